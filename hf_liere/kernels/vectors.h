// Small blocks that fill a vector of channels, or equal parts of it: query and key rotated by them, without copies of
// the states in another type.
#pragma once

#include "planes.h"

namespace {

// Replaces each channel i of a block by the channel i ^ DISTANCE.
template <int DISTANCE, int... INDICES>
INLINE Channels exchange(Channels vector, std::integer_sequence<int, INDICES...>) {
    return shuffle<(INDICES ^ DISTANCE)...>(vector, vector);
}

template <int DISTANCE>
INLINE Channels exchange(Channels vector) {
    return exchange<DISTANCE>(vector, std::make_integer_sequence<int, CHANNELS>{});
}

// Swaps the odd parts of the first vector with the even parts of the second one; parts have LENGTH channels.
template <int LENGTH, int... INDICES>
INLINE void swap_parts(Channels& first, Channels& second, std::integer_sequence<int, INDICES...>) {
    const Channels upper = shuffle<(INDICES & LENGTH ? CHANNELS + INDICES - LENGTH : INDICES)...>(first, second);
    second = shuffle<(INDICES & LENGTH ? CHANNELS + INDICES : INDICES + LENGTH)...>(first, second);
    first = upper;
}

// Swaps the odd parts of two vectors.
template <int LENGTH, int... INDICES>
INLINE void swap_odd_parts(Channels& first, Channels& second, std::integer_sequence<int, INDICES...>) {
    const Channels other = shuffle<(INDICES & LENGTH ? CHANNELS + INDICES : INDICES)...>(first, second);
    second = shuffle<(INDICES & LENGTH ? INDICES : CHANNELS + INDICES)...>(first, second);
    first = other;
}

// The matrices of the blocks of a vector. Row r of all blocks is a vector; after `skew` the vector d has the entries
// (i ^ d, i) of all channels i.
template <int SIZE>
struct Blocks {
    static constexpr int COUNT = CHANNELS / SIZE;
    Channels rows[SIZE];

    // Reads the blocks of `count` channels, which are contiguous in memory.
    INLINE void read(const float* source, int count) {
        for (int i = 0; i < SIZE; ++i) {
            const int start = i % COUNT * SIZE * SIZE + i / COUNT * CHANNELS;
            rows[i] = start < count * SIZE ? load<Channels>(source + start) : Channels{};
        }
        join_parts(std::integral_constant<int, 1>{});
    }

    // Transposes the parts of COUNT vectors each: its own inverse.
    template <int STEP>
    INLINE void join_parts(std::integral_constant<int, STEP>) {
        if constexpr (STEP < COUNT) {
            for (int i = 0; i < SIZE; ++i)
                if (!(i & STEP))
                    swap_parts<STEP * SIZE>(rows[i], rows[i + STEP], std::make_integer_sequence<int, CHANNELS>{});
            join_parts(std::integral_constant<int, 2 * STEP>{});
        }
    }

    // Its own inverse.
    template <int STEP = 1>
    INLINE void skew() {
        if constexpr (STEP < SIZE) {
            for (int i = 0; i < SIZE; ++i)
                if (!(i & STEP))
                    swap_odd_parts<STEP>(rows[i], rows[i + STEP], std::make_integer_sequence<int, CHANNELS>{});
            skew<2 * STEP>();
        }
    }

    // Transposes skewed blocks.
    template <int... DISTANCES>
    INLINE void transpose(std::integer_sequence<int, DISTANCES...>) {
        ((rows[DISTANCES] = exchange<DISTANCES>(rows[DISTANCES])), ...);
    }

    // A row of states times skewed blocks.
    template <int... DISTANCES>
    INLINE Channels multiply(Channels states, std::integer_sequence<int, DISTANCES...>) const {
        Channels sum = {};
        ((sum += exchange<DISTANCES>(states) * rows[DISTANCES]), ...);
        return sum;
    }
};

// cpu.apply_rotation for these blocks, those of one token and head at a time.
template <int SIZE, typename State>
bool rotate_small_blocks(const Shape& shape, const Pair& states, const Pair& out, const Shared& rotation, bool inverse,
                         int threads) {
    constexpr std::make_integer_sequence<int, SIZE> DISTANCES{};
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t work = 0; work < shape.rotations(); ++work) {
        const Place place(work, shape);
        const int64_t first = place.first, head = place.head, token = place.token;
        const float* matrices = rotation.at(first, head, token);
        for_channels(shape.width(), [=, &states, &out](int64_t i, int count) INLINED {
            Blocks<SIZE> blocks;
            blocks.read(matrices + i * SIZE, count);
            blocks.skew();
            // States are rows: multiply them by Rᵀ, or by R for the inverse.
            if (!inverse) blocks.transpose(DISTANCES);
            for (int64_t sample = first; sample < first + shape.samples(); ++sample)
                for (int which = 0; which < shape.states; ++which) {
                    const State* source = states.at<State>(which, sample, head, token) + i;
                    __builtin_prefetch(source + AHEAD);
                    store_channels(out.at<State>(which, sample, head, token) + i,
                                   blocks.multiply(load_channels(source, count), DISTANCES), count);
                }
        });
        pass_on<State>(shape, states, out, place);
    }
    return true;
}

}  // namespace

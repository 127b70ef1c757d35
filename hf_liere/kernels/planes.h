// Query and key rotated by planes, and the gradients of their angles, elementwise.
#pragma once

#include <cmath>

#include "rotation.h"

namespace {

constexpr int CHANNELS = VECTOR_BYTES / static_cast<int>(sizeof(float));
typedef float Channels __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t WideBits __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t NarrowBits __attribute__((vector_size(VECTOR_BYTES / 2)));

// Loads `count` values and fills the rest with zeros.
INLINE Channels load_channels(const float* source, int count) {
    return load_part<Channels>(source, count * sizeof(float));
}

INLINE Channels load_channels(const BFloat16* source, int count) {
    const auto narrow = load_part<NarrowBits>(source, count * sizeof(BFloat16));
    return reinterpret_cast<Channels>(__builtin_convertvector(narrow, WideBits) << 16);
}

INLINE void store_channels(float* target, Channels values, int count) {
    std::memcpy(target, &values, count * sizeof(float));
}

// As BFloat16 rounds.
INLINE void store_channels(BFloat16* target, Channels values, int count) {
    const auto wide = reinterpret_cast<WideBits>(values);
    const WideBits rounded = (wide + 0x7fff + (wide >> 16 & 1)) >> 16, quiet = wide >> 16 | 0x40;
    const WideBits is_nan = (wide & 0x7fffffff) > 0x7f800000;
    const auto narrow = __builtin_convertvector((is_nan & quiet) | (~is_nan & rounded), NarrowBits);
    std::memcpy(target, &narrow, count * sizeof(BFloat16));
}

// Calls body(channel, count) for the vectors that cover the channels below `width`.
template <typename Body>
INLINE void for_channels(int64_t width, Body body) {
    int64_t channel = 0;
    for (; channel + CHANNELS <= width; channel += CHANNELS) body(channel, CHANNELS);
    if (channel < width) body(channel, static_cast<int>(width - channel));
}

// Replaces each pair (x₀, x₁) by (x_EVEN, x_ODD).
template <int EVEN, int ODD, int... INDICES>
INLINE Channels pairwise(Channels vector, std::integer_sequence<int, INDICES...>) {
    return shuffle<(INDICES % 2 ? INDICES - 1 + ODD : INDICES + EVEN)...>(vector, vector);
}

template <int EVEN, int ODD>
INLINE Channels pairwise(Channels vector) {
    return pairwise<EVEN, ODD>(vector, std::make_integer_sequence<int, CHANNELS>{});
}

// (even, −even, even, …).
INLINE Channels alternating(float even) {
    Channels signs;
    for (int i = 0; i < CHANNELS; ++i) signs[i] = i % 2 == 0 ? even : -even;
    return signs;
}

// The direction (−sin, cos) in which cos and sin change with the angle.
INLINE Channels tangent(Channels cos_sin) { return alternating(-1) * pairwise<1, 0>(cos_sin); }

// cpu.apply_rotation for planes, one token of a sample at a time.
template <typename State>
void rotate_planes(const Shape& shape, const Pair& states, const Pair& out, const Shared& cos_sin, bool inverse,
                   int threads) {
    const int64_t width = shape.width();
    const Channels signs = alternating(inverse ? 1 : -1);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t work = 0; work < shape.batch * shape.tokens; ++work) {
        const int64_t sample = work / shape.tokens, token = work % shape.tokens;
        for (int which = 0; which < shape.states; ++which)
            for (int64_t head = 0; head < shape.heads; ++head) {
                const State* from = states.at<State>(which, sample, head, token);
                State* to = out.at<State>(which, sample, head, token);
                const float* angles = cos_sin.at(sample, head, token);
                for_channels(width, [&](int64_t i, int count) INLINED {
                    const Channels x = load_channels(from + i, count), angle = load_channels(angles + i, count);
                    const Channels cos = pairwise<0, 0>(angle), sin = signs * pairwise<1, 1>(angle);
                    store_channels(to + i, x * cos + pairwise<1, 0>(x) * sin, count);
                });
                std::copy(from + width, from + shape.head_dim, to + width);
            }
    }
}

// cpu.angle_gradients, one token and head at a time.
template <typename State>
void angle_gradients(const Shape& shape, const Pair& gradients, const Pair& states, const Shared& out, int threads) {
    const int64_t samples = shape.samples(), width = shape.width();
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t work = 0; work < shape.rotations(); ++work) {
        const Place place(work, shape);
        const int64_t first = place.first, head = place.head, token = place.token;
        float* target = out.at(first, head, token);
        for_channels(width, [=, &gradients, &states](int64_t i, int count) INLINED {
            Channels products = {};
            for (int64_t sample = first; sample < first + samples; ++sample)
                for (int which = 0; which < shape.states; ++which) {
                    const State* gradient = gradients.at<State>(which, sample, head, token) + i;
                    const State* state = states.at<State>(which, sample, head, token) + i;
                    __builtin_prefetch(gradient + AHEAD);
                    __builtin_prefetch(state + AHEAD);
                    products += pairwise<1, 0>(load_channels(gradient, count)) * load_channels(state, count);
                }
            for (int plane = 0; plane < count / 2; ++plane)
                target[i / 2 + plane] = products[2 * plane] - products[2 * plane + 1];
        });
    }
}

}  // namespace

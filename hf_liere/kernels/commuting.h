// The gradients of commuting generators, in the pass that rotates the gradients of query and key back.
#pragma once

#include <vector>

#include "vectors.h"

namespace {

// cos and sin of float64 angles, in float32 with errors of 1e-7: the polynomials of Cephes between −π/4 and π/4.
inline void find_circle(const double* angles, float* __restrict cos, float* __restrict sin, int64_t count) {
    // Adding it rounds to integers, which its last bits then contain.
    constexpr double ROUND = 6755399441055744.0, QUARTER = 1.5707963267948966;
    for (int64_t i = 0; i < count; ++i) {
        const double shifted = angles[i] * (1 / QUARTER) + ROUND;
        int64_t bits;
        std::memcpy(&bits, &shifted, sizeof(bits));
        const int32_t quarters = static_cast<int32_t>(bits);
        const float x = static_cast<float>(angles[i] - (shifted - ROUND) * QUARTER), square = x * x;
        const float odd = x + x * square * (-1.6666654611e-1f + square * (8.3321608736e-3f - square * 1.9515295891e-4f));
        const float even = 1 - 0.5f * square + square * square * (4.166664568298827e-2f +
                           square * (-1.388731625493765e-3f + square * 2.443315711809948e-5f));
        const float first = quarters & 1 ? odd : even, second = quarters & 1 ? even : odd;
        cos[i] = (quarters + 1) & 2 ? -first : first;
        sin[i] = quarters & 2 ? -second : second;
    }
}

// Each pair of planes j < k of a block has two lanes, one for the part of a matrix that commutes with rotations of both
// planes, with ½(μ_j − μ_k), and one for the part that anticommutes, with ½(μ_j + μ_k): first all of the one kind.
struct Lanes {
    int planes, pairs;
    // (heads, blocks, lanes) ½(μ_j ∓ μ_k) and their reciprocals; 0 and whether it is so where they are nearly zero.
    std::vector<double> halves;
    std::vector<float> reciprocals, is_zero;

    int64_t count() const { return 2 * pairs; }

    // From (heads, blocks, planes) frequencies.
    Lanes(int64_t size, int64_t blocks, const float* frequencies)
        : planes(static_cast<int>(size / 2)), pairs(planes * (planes - 1) / 2) {
        for (int64_t block = 0; block < blocks; ++block, frequencies += planes)
            for (int sign : {-1, 1})
                for (int j = 0; j < planes; ++j)
                    for (int k = j + 1; k < planes; ++k) add(0.5 * (frequencies[j] + double(sign) * frequencies[k]));
    }

    void add(double half) {
        const bool nearly_zero = std::abs(half) < 1e-30;
        halves.push_back(nearly_zero ? 0 : half);
        reciprocals.push_back(nearly_zero ? 0 : static_cast<float>(1 / half));
        is_zero.push_back(nearly_zero);
    }
};

// Adds (real + i imaginary) · s e^(−ix) sin(x) / x for the phases s and x = s · half, given cos and sin of x.
inline void add_integrals(int64_t count, float* __restrict real_sums, float* __restrict imaginary_sums, const float* real,
                          const float* imaginary, const float* cos, const float* sin, const float* phases,
                          const float* reciprocals, const float* is_zero) {
    for (int64_t i = 0; i < count; ++i) {
        const float length = sin[i] * reciprocals[i] + phases[i] * is_zero[i];
        real_sums[i] += length * (real[i] * cos[i] + imaginary[i] * sin[i]);
        imaginary_sums[i] += length * (imaginary[i] * cos[i] - real[i] * sin[i]);
    }
}

// The parts of M − Mᵀ in the lanes of a head, and their integrals.
struct Integrals {
    std::vector<double> angles;
    std::vector<float> real, imaginary, cos, sin, phases;

    explicit Integrals(int64_t lanes) : angles(lanes) {
        for (auto* values : {&real, &imaginary, &cos, &sin, &phases}) values->resize(lanes);
    }

    // As rotation_gradients.eigen_gradients for one head of one token: adds to the (2, blocks, lanes) sums.
    void integrate(float* sums, const Lanes& lanes, int64_t head, int64_t blocks, const float* phase) {
        const int64_t count = lanes.count(), total = blocks * count;
        const double* halves = lanes.halves.data() + head * total;
        const float *reciprocals = lanes.reciprocals.data() + head * total, *is_zero = lanes.is_zero.data() + head * total;
        for (int64_t block = 0; block < blocks; ++block)
            for (int64_t i = block * count; i < (block + 1) * count; ++i) {
                phases[i] = phase[block];
                angles[i] = phase[block] * halves[i];
            }
        find_circle(angles.data(), cos.data(), sin.data(), total);
        add_integrals(total, sums, sums + total, real.data(), imaginary.data(), cos.data(), sin.data(), phases.data(),
                      reciprocals, is_zero);
    }
};

template <typename Rows>
struct CommutingScratch : Integrals {
    static constexpr int SIZE = Rows::SIZE;
    Rows gradients, states;
    Matrix<SIZE, float> outer;

    CommutingScratch(const Shape& shape, int64_t lanes) : Integrals(lanes), gradients(shape), states(shape) {}

    // An entry of M − Mᵀ.
    INLINE float skew(int i, int j) const { return outer.row(i)[j] - outer.row(j)[i]; }

    // As rotation_gradients._plane_parts, for the block whose lanes start at `first`.
    template <typename Planes>
    INLINE void find_parts(int64_t first, Planes planes) {
        const int pairs = planes * (planes - 1) / 2;
        float *commuting = &real[first], *anticommuting = commuting + pairs;
        float *swapped = &imaginary[first], *antiswapped = swapped + pairs;
        for (int j = 0; j < planes; ++j)
            for (int k = j + 1; k < planes; ++k) {
                const float upper_left = skew(2 * j, 2 * k), lower_right = skew(2 * j + 1, 2 * k + 1);
                const float upper_right = skew(2 * j, 2 * k + 1), lower_left = skew(2 * j + 1, 2 * k);
                *commuting++ = upper_left + lower_right, *anticommuting++ = upper_left - lower_right;
                *swapped++ = lower_left - upper_right, *antiswapped++ = upper_right + lower_left;
            }
    }
};

INLINE int half(int size) { return size / 2; }

template <int SIZE>
INLINE std::integral_constant<int, SIZE / 2> half(std::integral_constant<int, SIZE>) {
    return {};
}

// M − Mᵀ for M = Σ g rᵀ and the blocks of a vector: the entries of all channels i and i ^ d for d = 1 … SIZE − 1.
template <int SIZE, typename Distances = std::make_integer_sequence<int, SIZE - 1>>
struct SkewSums;

template <int SIZE, int... DISTANCES>
struct SkewSums<SIZE, std::integer_sequence<int, DISTANCES...>> {
    Channels at[SIZE - 1] = {};

    INLINE void add(Channels gradient, Channels state) {
        ((at[DISTANCES] += gradient * exchange<DISTANCES + 1>(state)), ...);
    }

    INLINE void subtract_transpose() { ((at[DISTANCES] -= exchange<DISTANCES + 1>(at[DISTANCES])), ...); }

    // As CommutingScratch::find_parts, for the `count` channels that these sums belong to.
    INLINE void find_parts(float* real, float* imaginary, int count) const {
        constexpr int PLANES = SIZE / 2, PAIRS = PLANES * (PLANES - 1) / 2;
        float commuting[PLANES][CHANNELS], swapped[PLANES][CHANNELS];
        for (int distance = 1; distance < PLANES; ++distance) {
            const Channels same = at[2 * distance - 1], other = at[2 * distance];
            store(commuting[distance], pairwise<0, 0>(same) + alternating(1) * pairwise<1, 1>(same));
            store(swapped[distance], pairwise<1, 1>(other) + alternating(-1) * pairwise<0, 0>(other));
        }
        for (int block = 0; block < count; block += SIZE, real += PAIRS, imaginary += PAIRS)
            for (int j = 0; j < PLANES; ++j)
                for (int k = j + 1; k < PLANES; ++k, ++real, ++imaginary) {
                    const int lane = block + 2 * j;
                    real[0] = commuting[j ^ k][lane], real[PAIRS] = commuting[j ^ k][lane + 1];
                    imaginary[0] = swapped[j ^ k][lane], imaginary[PAIRS] = swapped[j ^ k][lane + 1];
                }
    }
};

// cpu.commuting_backward for blocks that fill a vector of channels or equal parts of it: everything in one pass.
template <int SIZE, typename State>
bool commuting_backward_by_vectors(const Shape& shape, const Pair& gradients, const Pair& states, const Shared& out,
                                   const Pair& back, const Shared& cos_sin, const Shared& phases, int64_t group,
                                   const float* frequencies, float* sums, int threads) {
    const Lanes lanes(SIZE, shape.heads * shape.blocks, frequencies);
    const int64_t numbers = shape.blocks * 2 * lanes.count();
    const Channels signs = alternating(1);
    const auto compute = [&](int64_t work, Integrals& integrals) {
        const Place place(work, shape);
        const int64_t head = place.head, token = place.token;
        const float* angles = cos_sin.at(0, head, token);
        float* by_cos_sin = out.at(0, head, token);
        for_channels(shape.width(), [&](int64_t i, int count) INLINED {
            const Channels angle = load_channels(angles + i, count);
            const Channels cos = pairwise<0, 0>(angle), sin = signs * pairwise<1, 1>(angle);
            SkewSums<SIZE> skew;
            for (int64_t sample = 0; sample < shape.batch; ++sample)
                for (int which = 0; which < shape.states; ++which) {
                    const State* source = gradients.at<State>(which, sample, head, token) + i;
                    const State* state = states.at<State>(which, sample, head, token) + i;
                    __builtin_prefetch(source + AHEAD);
                    __builtin_prefetch(state + AHEAD);
                    const Channels gradient = load_channels(source, count);
                    skew.add(gradient, load_channels(state, count));
                    store_channels(back.at<State>(which, sample, head, token) + i,
                                   gradient * cos + pairwise<1, 0>(gradient) * sin, count);
                }
            skew.subtract_transpose();
            store_channels(by_cos_sin + i, pairwise<1, 1>(skew.at[0]) * tangent(angle), count);
            const int64_t lane = i * lanes.count() / SIZE;
            skew.find_parts(&integrals.real[lane], &integrals.imaginary[lane], count);
        });
        pass_on<State>(shape, gradients, back, place);
        float* sum = sums + (token / group * shape.heads + head) * numbers;
        integrals.integrate(sum, lanes, head, shape.blocks, phases.at(0, head, token));
    };
    // One thread adds the tokens of a group, one after the other.
    return parallel_for<Integrals>(shape.rotations(), group * shape.heads, threads, compute,
                                   shape.blocks * lanes.count());
}

// cpu.commuting_backward for other blocks: a few tokens at a time, each with separate sums for the gradient of the generators.
template <typename Rows>
bool commuting_backward(const Shape& shape, const Pair& gradients, const Pair& states, const Shared& out,
                        const Pair& back, const Shared& cos_sin, const Shared& phases, int64_t group,
                        const float* frequencies, float* sums, int threads) {
    using State = typename Rows::State;
    const Lanes lanes(shape.size, shape.heads * shape.blocks, frequencies);
    const int64_t planes = shape.size / 2, numbers = shape.blocks * 2 * lanes.count();
    const Channels signs = alternating(1);
    const auto compute = [&](int64_t work, CommutingScratch<Rows>& scratch) {
        const Place place(work, shape);
        const int64_t head = place.head, token = place.token;
        const float *angles = cos_sin.at(0, head, token), *phase = phases.at(0, head, token);
        for_channels(shape.width(), [&](int64_t i, int count) INLINED {
            const Channels angle = load_channels(angles + i, count);
            const Channels cos = pairwise<0, 0>(angle), sin = signs * pairwise<1, 1>(angle);
            for (int64_t sample = 0; sample < shape.batch; ++sample)
                for (int which = 0; which < shape.states; ++which) {
                    const State* source = gradients.at<State>(which, sample, head, token) + i;
                    __builtin_prefetch(source + AHEAD);
                    __builtin_prefetch(states.at<State>(which, sample, head, token) + i + AHEAD);
                    const auto gradient = load_channels(source, count);
                    store_channels(back.at<State>(which, sample, head, token) + i,
                                   gradient * cos + pairwise<1, 0>(gradient) * sin, count);
                }
        });
        pass_on<State>(shape, gradients, back, place);
        scratch.gradients.start(gradients, place);
        scratch.states.start(states, place);
        float* by_cos_sin = out.at(0, head, token);
        float* sum = sums + (token / group * shape.heads + head) * numbers;
        for (int64_t block = 0; block < shape.blocks; ++block) {
            scratch.gradients.read();
            scratch.states.read();
            sum_outer_products(scratch.outer, scratch.gradients.values, scratch.states.values);
            for (int plane = 0; plane < planes; ++plane, by_cos_sin += 2, angles += 2) {
                const float by_angle = scratch.skew(2 * plane + 1, 2 * plane);
                by_cos_sin[0] = by_angle * -angles[1], by_cos_sin[1] = by_angle * angles[0];
            }
            with_exact_size<Rows::SIZE>(shape.size, [&](auto size) INLINED {
                scratch.find_parts(block * lanes.count(), half(size));
            });
            scratch.gradients.next();
            scratch.states.next();
        }
        scratch.integrate(sum, lanes, head, shape.blocks, phase);
    };
    // One thread adds the tokens of a group, one after the other.
    return parallel_for<CommutingScratch<Rows>>(shape.rotations(), group * shape.heads, threads, compute, shape,
                                                shape.blocks * lanes.count());
}

}  // namespace

// The gradients of commuting generators, in the pass that rotates the gradients of query and key back.
#pragma once

#include <vector>

#include "planes.h"

namespace {

// cos and sin of float64 angles, in float32 with errors of 1e-7: the polynomials of Cephes between −π/4 and π/4.
INLINE void find_circle(const double* angles, float* cos, float* sin, int count) {
    // Adding it rounds to integers, which its last bits then contain.
    constexpr double ROUND = 6755399441055744.0, QUARTER = 1.5707963267948966;
    for (int i = 0; i < count; ++i) {
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

// For each pair of planes j < k of a block two lanes, one for the part of a matrix that commutes with rotations of both
// planes, one for the part that anticommutes: ½(μ_j − μ_k) of all pairs, then ½(μ_j + μ_k).
struct Lanes {
    int planes, pairs;
    // (heads, blocks, 2 · pairs)
    std::vector<double> halves;

    int64_t count() const { return 2 * pairs; }

    // From (heads, blocks, planes) frequencies.
    Lanes(int64_t size, int64_t blocks, const float* frequencies)
        : planes(static_cast<int>(size / 2)), pairs(planes * (planes - 1) / 2), halves(blocks * count()) {
        for (int64_t block = 0; block < blocks; ++block, frequencies += planes)
            for (int sign : {-1, 1}) {
                double* half = &halves[block * count()] + (sign < 0 ? 0 : pairs);
                for (int j = 0; j < planes; ++j)
                    for (int k = j + 1; k < planes; ++k) *half++ = 0.5 * (frequencies[j] + sign * frequencies[k]);
            }
    }
};

template <typename Rows>
struct CommutingScratch {
    static constexpr int SIZE = Rows::SIZE, PLANES = SIZE / 2, MOST = PLANES * (PLANES - 1);
    Rows gradients, states;
    Matrix<SIZE, float> outer;
    alignas(VECTOR_BYTES) double angles[MOST];
    alignas(VECTOR_BYTES) float real[MOST], imaginary[MOST], cos[MOST], sin[MOST];
    explicit CommutingScratch(const Shape& shape) : gradients(shape), states(shape) {}

    // An entry of M − Mᵀ.
    INLINE float skew(int i, int j) const { return outer.row(i)[j] - outer.row(j)[i]; }

    // As rotation_gradients.eigen_gradients for one block of one token: adds to the (2, lanes) sums.
    template <typename Planes>
    INLINE void integrate(float* sums, const double* halves, float phase, Planes planes) {
        const int pairs = planes * (planes - 1) / 2, lanes = 2 * pairs;
        int lane = 0;
        for (int j = 0; j < planes; ++j)
            for (int k = j + 1; k < planes; ++k, ++lane) {
                const float upper_left = skew(2 * j, 2 * k), lower_right = skew(2 * j + 1, 2 * k + 1);
                const float upper_right = skew(2 * j, 2 * k + 1), lower_left = skew(2 * j + 1, 2 * k);
                real[lane] = upper_left + lower_right, imaginary[lane] = lower_left - upper_right;
                real[pairs + lane] = upper_left - lower_right, imaginary[pairs + lane] = upper_right + lower_left;
            }
        for (int i = 0; i < lanes; ++i) angles[i] = phase * halves[i];
        find_circle(angles, cos, sin, lanes);
        for (int i = 0; i < lanes; ++i) {
            const float half = static_cast<float>(angles[i]), length = half == 0 ? phase : phase * sin[i] / half;
            sums[i] += length * (real[i] * cos[i] + imaginary[i] * sin[i]);
            sums[lanes + i] += length * (imaginary[i] * cos[i] - real[i] * sin[i]);
        }
    }
};

// cpu.commuting_backward: a few tokens at a time, each with separate sums for the gradient of the generators.
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
                    const auto gradient = load_channels(gradients.at<State>(which, sample, head, token) + i, count);
                    store_channels(back.at<State>(which, sample, head, token) + i,
                                   gradient * cos + pairwise<1, 0>(gradient) * sin, count);
                }
        });
        pass_on<State>(shape, gradients, back, place);
        scratch.gradients.start(gradients, place);
        scratch.states.start(states, place);
        float* by_cos_sin = out.at(0, head, token);
        float* sum = sums + (token / group * shape.heads + head) * numbers;
        const double* halves = lanes.halves.data() + head * shape.blocks * lanes.count();
        for (int64_t block = 0; block < shape.blocks; ++block) {
            scratch.gradients.read();
            scratch.states.read();
            sum_outer_products(scratch.outer, scratch.gradients.values, scratch.states.values);
            for (int plane = 0; plane < planes; ++plane, by_cos_sin += 2, angles += 2) {
                const float by_angle = scratch.skew(2 * plane + 1, 2 * plane);
                by_cos_sin[0] = by_angle * -angles[1], by_cos_sin[1] = by_angle * angles[0];
            }
            with_exact_size<Rows::SIZE>(shape.size, [&](auto size) INLINED {
                if constexpr (std::is_same_v<decltype(size), int>)
                    scratch.integrate(sum, halves, phase[block], size / 2);
                else
                    scratch.integrate(sum, halves, phase[block], std::integral_constant<int, size / 2>{});
            });
            sum += 2 * lanes.count(), halves += lanes.count();
            scratch.gradients.next();
            scratch.states.next();
        }
    };
    // One thread adds the tokens of a group, one after the other.
    return parallel_for<CommutingScratch<Rows>>(shape.rotations(), group * shape.heads, threads, compute, shape);
}

}  // namespace

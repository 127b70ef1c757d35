// Rotations of blocks of 3 and 4 channels in closed form, and the gradients of their exponents, as in
// fast/closed_forms.py, but one vector of blocks at a time.
#pragma once

#include <cmath>

#include "exponential.h"
#include "planes.h"

namespace {

// Blocks in a vector, and the units 1, i, j, k.
constexpr int LANES = CHANNELS, UNITS = 4;
typedef int32_t Masks __attribute__((vector_size(VECTOR_BYTES)));

// unit(left) · unit(right) = sign · unit(index).
struct UnitProduct {
    int index;
    float sign;
};

constexpr UnitProduct multiply_units(int left, int right) {
    if (left == 0 || right == 0) return {left + right, 1.0f};
    if (left == right) return {0, -1.0f};
    return {6 - left - right, (right - left + 3) % 3 == 1 ? 1.0f : -1.0f};
}

INLINE Channels select(Masks mask, Channels yes, Channels no) {
    return reinterpret_cast<Channels>((mask & reinterpret_cast<Masks>(yes)) | (~mask & reinterpret_cast<Masks>(no)));
}

// The exponent u of a vector of blocks, and exp(u).
struct UnitQuaternion {
    Channels unit[UNITS], exponent[3], angle, sinc;

    // From coordinates (axes,) and generators (axes, …, 3, blocks), both strided. Float64 until the angle is small.
    INLINE void compute(const double* coordinates, const double* generators, int64_t axes, int64_t axis_stride,
                        int64_t stride, int count) {
        alignas(VECTOR_BYTES) float small[LANES] = {}, angles[LANES] = {}, quarters[LANES] = {}, parts[3][LANES] = {};
        double sums[3][LANES] = {};
        for (int64_t axis = 0; axis < axes; ++axis)
            for (int part = 0; part < 3; ++part) {
                const double* source = generators + axis * axis_stride + part * stride;
                for (int i = 0; i < count; ++i) sums[part][i] += coordinates[axis] * source[i];
            }
        for (int i = 0; i < LANES; ++i) {
            const double x = sums[0][i], y = sums[1][i], z = sums[2][i];
            const double squared = std::max(x * x + y * y + z * z, 1e-28), angle = std::sqrt(squared);
            // Adding and subtracting 1.5 · 2⁵² rounds to the nearest integer.
            constexpr double ROUND = 6755399441055744.0, QUARTER = 1.57079632679489661923;
            const double quarter = (angle * (1 / QUARTER) + ROUND) - ROUND;
            const double whole = (quarter * 0.25 - 0.375 + ROUND) - ROUND;
            small[i] = static_cast<float>(angle - quarter * QUARTER);
            quarters[i] = static_cast<float>(quarter - 4 * whole);
            angles[i] = static_cast<float>(angle);
            for (int part = 0; part < 3; ++part) parts[part][i] = static_cast<float>(sums[part][i]);
        }
        const Channels x = load<Channels>(small), quarter = load<Channels>(quarters), z = x * x;
        // Taylor's series, with errors below 2e-9 up to π/4.
        const Channels sin = x + x * z * (z * (z * (z * (1 / 362880.0f) - 1 / 5040.0f) + 1 / 120.0f) - 1 / 6.0f);
        const Channels cos =
            1 + z * (z * (z * (z * (1 / 40320.0f - z * (1 / 3628800.0f)) - 1 / 720.0f) + 1 / 24.0f) - 0.5f);
        const Masks odd = (quarter == 1) | (quarter == 3);
        const Channels first = select(odd, sin, cos), second = select(odd, cos, sin);
        unit[0] = select((quarter == 1) | (quarter == 2), -first, first);
        angle = load<Channels>(angles);
        sinc = select(quarter > 1, -second, second) / angle;
        for (int part = 0; part < 3; ++part) {
            exponent[part] = load<Channels>(parts[part]);
            unit[part + 1] = exponent[part] * sinc;
        }
    }

    // The gradient of the exponent, from that of exp(u).
    INLINE void find_gradient(const Channels (&by_unit)[UNITS], Channels (&by_exponent)[3]) const {
        Channels along = {};
        for (int part = 0; part < 3; ++part) along += by_unit[part + 1] * exponent[part];
        // The derivative of sin x / x, divided by x, is −1/3 near zero.
        const Channels curvature = select(angle < 1e-3f, Channels{} - 1 / 3.0f, (unit[0] - sinc) / (angle * angle));
        along = along * curvature - sinc * by_unit[0];
        for (int part = 0; part < 3; ++part) by_exponent[part] = sinc * by_unit[part + 1] + exponent[part] * along;
    }
};

// Copies the entries of `count` blocks, (blocks, NUMEL) in memory, from or to vectors of blocks.
template <int NUMEL>
INLINE void read_blocks(Channels (&entries)[NUMEL], const float* source, int count) {
    alignas(VECTOR_BYTES) float values[NUMEL][LANES] = {};
    for (int i = 0; i < count; ++i)
        for (int entry = 0; entry < NUMEL; ++entry) values[entry][i] = source[i * NUMEL + entry];
    for (int entry = 0; entry < NUMEL; ++entry) entries[entry] = load<Channels>(values[entry]);
}

template <int NUMEL>
INLINE void write_blocks(float* target, const Channels (&entries)[NUMEL], int count) {
    alignas(VECTOR_BYTES) float values[NUMEL][LANES];
    for (int entry = 0; entry < NUMEL; ++entry) store(values[entry], entries[entry]);
    for (int i = 0; i < count; ++i)
        for (int entry = 0; entry < NUMEL; ++entry) target[i * NUMEL + entry] = values[entry][i];
}

// v ↦ e v f for blocks of 4; for blocks of 3, f is the conjugate of e, and v imaginary.
template <int SIZE>
struct QuaternionPair {
    static constexpr int HALVES = SIZE - 2, NUMEL = SIZE * SIZE, FIRST = UNITS - SIZE;
    UnitQuaternion halves[HALVES];

    // Calls body(left, right, entry, sign) for the products of units that an entry of the matrix contains.
    template <typename Body>
    static INLINE void for_products(Body body) {
#pragma GCC unroll 4
        for (int left = 0; left < UNITS; ++left)
#pragma GCC unroll 4
            for (int right = 0; right < UNITS; ++right)
#pragma GCC unroll 4
                for (int column = FIRST; column < UNITS; ++column) {
                    const UnitProduct once = multiply_units(left, column), twice = multiply_units(once.index, right);
                    if (twice.index < FIRST) continue;
                    const float conjugate = HALVES == 1 && right ? -1.0f : 1.0f;
                    body(left, right, (twice.index - FIRST) * SIZE + column - FIRST, once.sign * twice.sign * conjugate);
                }
    }

    INLINE void write(float* target, int count) const {
        Channels entries[NUMEL] = {};
        for_products([&](int left, int right, int entry, float sign) INLINED {
            entries[entry] += sign * (halves[0].unit[left] * halves[HALVES - 1].unit[right]);
        });
        write_blocks(target, entries, count);
    }

    INLINE void find_gradients(const float* source, Channels (&by_exponents)[HALVES][3], int count) const {
        Channels entries[NUMEL], by_units[HALVES][UNITS] = {};
        read_blocks(entries, source, count);
        for_products([&](int left, int right, int entry, float sign) INLINED {
            by_units[0][left] += sign * (entries[entry] * halves[HALVES - 1].unit[right]);
            by_units[HALVES - 1][right] += sign * (entries[entry] * halves[0].unit[left]);
        });
        for (int half = 0; half < HALVES; ++half) halves[half].find_gradient(by_units[half], by_exponents[half]);
    }
};

// Calls body(pair, group · tokens + token, block, count) for the vectors of blocks of every group and token.
template <int SIZE, typename Body>
void for_quaternions(const Sizes& sizes, int64_t tokens, const double* positions, const double* generators,
                     int threads, Body body) {
    constexpr int HALVES = SIZE - 2;
    const int64_t axes = sizes.axes, blocks = sizes.blocks;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t work = 0; work < sizes.groups * tokens; ++work) {
        const int64_t group = work / tokens, token = work % tokens;
        for (int64_t block = 0; block < blocks; block += LANES) {
            const int count = static_cast<int>(std::min<int64_t>(LANES, blocks - block));
            QuaternionPair<SIZE> pair;
            for (int64_t half = 0; half < HALVES; ++half)
                pair.halves[half].compute(positions + token * axes,
                                          generators + (group * axes * HALVES + half) * 3 * blocks + block, axes,
                                          HALVES * 3 * blocks, blocks, count);
            body(pair, work, block, count);
        }
    }
}

// cpu.quaternion_rotations.
template <int SIZE>
void quaternion_rotations(const Sizes& sizes, int64_t tokens, const double* positions, const double* generators,
                          float* rotations, int threads) {
    for_quaternions<SIZE>(sizes, tokens, positions, generators, threads,
                          [&](const auto& pair, int64_t work, int64_t block, int count) INLINED {
                              pair.write(rotations + (work * sizes.blocks + block) * SIZE * SIZE, count);
                          });
}

// cpu.quaternion_gradients.
template <int SIZE>
void quaternion_gradients(const Sizes& sizes, int64_t tokens, const double* positions, const double* generators,
                          const float* gradients, float* out, int threads) {
    constexpr int HALVES = SIZE - 2;
    for_quaternions<SIZE>(
        sizes, tokens, positions, generators, threads,
        [&](const auto& pair, int64_t work, int64_t block, int count) INLINED {
            Channels by_exponents[HALVES][3];
            pair.find_gradients(gradients + (work * sizes.blocks + block) * SIZE * SIZE, by_exponents, count);
            for (int half = 0; half < HALVES; ++half)
                for (int part = 0; part < 3; ++part)
                    store_channels(out + ((work * HALVES + half) * 3 + part) * sizes.blocks + block,
                                   by_exponents[half][part], count);
        });
}

}  // namespace

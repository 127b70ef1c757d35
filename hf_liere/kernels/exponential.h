// Rotations of blocks by scaling and squaring, and the gradients of their generators, as in models/rotation:
// scaling_and_squaring.py and exponential_gradient.py, but one block of a ray at a time.
#pragma once

#include <cmath>
#include <utility>
#include <vector>

#include "matrix.h"

// The same structures as in cpu_library.py.
struct Sizes {
    // Of generators; a block is `size` × `size`.
    int64_t axes, groups, blocks, size;

    int64_t numel() const { return size * size; }
    // Above the diagonal.
    int64_t entries() const { return size * (size - 1) / 2; }
};

// As RayTokens of fast/scaling_and_squaring.py, with the squares that lead to a ray's first rotation.
struct Rays {
    const int64_t* tokens;     // (count, longest), −1 beyond the end of a ray
    const int64_t* squarings;  // (count,)
    const int64_t* offsets;    // (count,) index of a ray's first saved square
    float* saved_squares;      // (groups, saved, blocks, b, b), or null
    int64_t count, longest, saved, interval, step, mirror;

    int64_t length(int64_t ray) const {
        const int64_t* first = tokens + ray * longest;
        return std::find_if(first, first + longest, [](int64_t token) { return token < 0; }) - first;
    }

    // Every `interval`-th square is saved.
    float* saved_square(const Sizes& sizes, int64_t group, int64_t ray, int64_t squaring, int64_t block) const {
        const int64_t square = group * saved + offsets[ray] + squaring / interval;
        return saved_squares + (square * sizes.blocks + block) * sizes.numel();
    }
};

// The monomials of GradientMoments, by degree.
struct Monomials {
    const double* coefficients;  // (degrees,)
    const int64_t* counts;       // (degrees,) of monomials
    const int64_t* raised;       // for each degree except the last (axes, count): the index of x_a times each monomial
    int64_t degrees, total;
};

namespace {

template <int SIZE, typename T>
struct Exponential {
    Matrix<SIZE, T> exponent, second, third, sixth, combinations[5];

    // exp(exponent) by the polynomial of fast/scaling_and_squaring.py, in combinations[1].
    void compute(const double* polynomial) {
        multiply_half<1>(second, exponent, exponent);
        multiply_half<-1>(third, second, exponent);
        multiply_half<1>(sixth, third, third);
        T coefficients[25];
        std::copy_n(polynomial, 25, coefficients);
        for (int i = 0; i < exponent.NUMEL; ++i)
            for (int c = 0; c < 5; ++c) {
                const T* row = coefficients + 5 * c;
                combinations[c].values[i] = row[1] * exponent.values[i] + row[2] * second.values[i] +
                                            row[3] * third.values[i] + row[4] * sixth.values[i];
            }
        for (int c = 0; c < 5; ++c)
            for (int i = 0; i < SIZE; ++i) combinations[c].row(i)[i] += coefficients[5 * c];
        auto& [b1, b2, b3, b4, b5] = combinations;
        multiply<false, true>(b4, b1, b5);
        b3 += b4;
        multiply<false, true>(b2, b3, b4);
    }
};

template <int SIZE>
struct TangentScratch {
    Matrix<SIZE, float> rotation, gradient, tangent, total, first, step, tail, spare, squares[2];
};

template <int SIZE>
struct MomentsScratch {
    std::vector<Matrix<SIZE, float>> generators, level, higher;
    Matrix<SIZE, float> spare;
    MomentsScratch(int64_t axes, int64_t widest) : generators(axes), level(widest), higher(widest) {}
};

// sum += R · tangent · Rᵀ of a skew-symmetric tangent, given Rᵀ.
template <int SIZE>
INLINE void add_conjugated(Matrix<SIZE, float>& sum, const Matrix<SIZE, float>& tangent,
                           const Matrix<SIZE, float>& transposed, Matrix<SIZE, float>& spare) {
    multiply<true>(spare, transposed, tangent);
    multiply_half<-1, true>(sum, spare, transposed);
}

// cpu.block_rotations, except for tokens outside all rays.
template <int SIZE, typename T>
bool block_rotations(const Sizes& sizes, const Rays& rays, const T* positions, const T* generators,
                     const double* polynomial, float* const* rotations, int threads) {
    const int64_t axes = sizes.axes, groups = sizes.groups, blocks = sizes.blocks, numel = sizes.numel();
    const auto compute = [&](int64_t work, Exponential<SIZE, T>& scratch) {
        const int64_t group = work / rays.count, ray = work % rays.count, squarings = rays.squarings[ray];
        const int64_t* tokens = rays.tokens + ray * rays.longest;
        const T scale = std::ldexp(T(1), -static_cast<int>(squarings));
        for (int64_t block = 0; block < blocks; ++block) {
            scratch.exponent.clear_padding(sizes.size);
            for (int64_t axis = 0; axis < axes; ++axis) {
                const T coordinate = positions[tokens[0] * axes + axis] * scale;
                const T* generator = generators + ((axis * groups + group) * blocks + block) * numel;
                with_exact_size<SIZE>(sizes.size, [&](auto n) INLINED {
                    for (int i = 0; i < n; ++i)
                        for (int j = 0; j < n; ++j)
                            scratch.exponent.row(i)[j] =
                                (axis ? scratch.exponent.row(i)[j] : T(0)) + coordinate * generator[i * n + j];
                });
            }
            scratch.compute(polynomial);
            Matrix<SIZE, T>*square = &scratch.combinations[1], *spare = &scratch.combinations[0];
            for (int64_t s = 0; s < squarings; ++s) {
                if (rays.saved_squares && s % rays.interval == 0)
                    square->write(rays.saved_square(sizes, group, ray, s, block), sizes.size);
                multiply(*spare, *square, *square);
                std::swap(square, spare);
            }
            const Matrix<SIZE, T>&first = *square, *step = square;
            Matrix<SIZE, T>*rotation = spare, *next = &scratch.combinations[2];
            const int64_t length = rays.length(ray);
            if (rays.step == 2 && length > 1) {
                multiply(scratch.combinations[3], first, first);
                step = &scratch.combinations[3];
            }
            for (int64_t k = 0; k < length; ++k) {
                if (k > 0) {
                    multiply(*next, k == 1 ? first : *rotation, *step);
                    std::swap(rotation, next);
                }
                const Matrix<SIZE, T>& result = k ? *rotation : first;
                result.write(rotations[group] + (tokens[k] * blocks + block) * numel, sizes.size);
                if (rays.mirror < 0) continue;
                Matrix<SIZE, T>& transposed = scratch.combinations[4];
                transposed.read_transposed(result.values, SIZE);
                transposed.write(rotations[group] + ((rays.mirror - tokens[k]) * blocks + block) * numel, sizes.size);
            }
        }
    };
    return parallel_for<Exponential<SIZE, T>>(groups * rays.count, 1, threads, compute);
}

// cpu.block_tangents.
template <int SIZE>
bool block_tangents(const Sizes& sizes, const Rays& rays, const float* const* rotations,
                    const float* const* gradients, float* tangents, int threads) {
    const int64_t blocks = sizes.blocks, size = sizes.size;
    const auto compute = [&](int64_t work, TangentScratch<SIZE>& scratch) {
        auto& [rotation, gradient, tangent, total, first, step, tail, spare, squares] = scratch;
        const int64_t group = work / rays.count, ray = work % rays.count, squarings = rays.squarings[ray];
        const int64_t *tokens = rays.tokens + ray * rays.longest, length = rays.length(ray);
        for (int64_t block = 0; block < blocks; ++block) {
            // The gradient of a tangent of R from those of R, R², …, by Horner's rule, for one ray.
            first.read_transposed(rotations[group] + (tokens[0] * blocks + block) * sizes.numel(), size);
            const bool pairs = rays.step == 2 && length > 1;
            if (pairs) multiply(step, first, first);
            for (int64_t k = length - 1; k >= 0; --k) {
                const int64_t offset = (tokens[k] * blocks + block) * sizes.numel();
                rotation.read(rotations[group] + offset, size);
                gradient.read(gradients[group] + offset, size);
                if (rays.mirror >= 0) {
                    const int64_t opposite = ((rays.mirror - tokens[k]) * blocks + block) * sizes.numel();
                    spare.read_transposed(gradients[group] + opposite, size);
                    gradient += spare;
                }
                multiply<true>(tangent, rotation, gradient);
                subtract_transpose(tangent, spare);
                if (k == length - 1) {
                    total = tail = tangent;
                    continue;
                }
                tail += tangent;
                if (pairs && k == 0) {
                    std::fill_n(tangent.values, tangent.NUMEL, 0.0f);
                    add_conjugated(tangent, total, first, spare);
                    total = tail;
                    total += tangent;
                    add_conjugated(total, tangent, first, spare);
                    continue;
                }
                tangent = tail;
                add_conjugated(tangent, total, pairs ? step : first, spare);
                total = tangent;
            }
            // As exponential_gradient._conjugate, for one ray.
            Matrix<SIZE, float>*square = &squares[0], *next = &squares[1];
            for (int64_t s = 0; s < squarings; ++s) {
                if (s % rays.interval == 0)
                    square->read_transposed(rays.saved_square(sizes, group, ray, s, block), size);
                add_conjugated(total, total, *square, spare);
                if (s + 1 < squarings && (s + 1) % rays.interval) {
                    multiply(*next, *square, *square);
                    std::swap(square, next);
                }
            }
            float* target = tangents + (work * blocks + block) * sizes.entries();
            with_exact_size<SIZE>(size, [&](auto n) INLINED {
                for (int i = 0; i < n; ++i)
                    target = std::copy(scratch.total.row(i) + i + 1, scratch.total.row(i) + n, target);
            });
        }
    };
    return parallel_for<TangentScratch<SIZE>>(sizes.groups * rays.count, 1, threads, compute);
}

// cpu.moments_gradient, as exponential_gradient.GradientMoments._gradient, one block of a group at a time.
template <int SIZE>
bool moments_gradient(const Sizes& sizes, const Monomials& monomials, const float* generators, const float* moments,
                      float* out, int threads) {
    const int64_t axes = sizes.axes, blocks = sizes.blocks, count = sizes.groups * blocks;
    const int64_t *counts = monomials.counts, degrees = monomials.degrees, total = monomials.total;
    const int64_t widest = *std::max_element(counts, counts + degrees);
    const auto compute = [&](int64_t work, MomentsScratch<SIZE>& scratch) {
        auto& [factors, level, higher, spare] = scratch;
        const int64_t group = work / blocks, block = work % blocks;
        for (int64_t axis = 0; axis < axes; ++axis)
            factors[axis].read(generators + (axis * count + work) * sizes.numel(), sizes.size);
        int64_t monomial = total;
        const int64_t* indices = monomials.raised + axes * (total - counts[degrees - 1]);
        for (int64_t degree = degrees - 1; degree >= 0; --degree) {
            const int64_t width = counts[degree];
            monomial -= width;
            if (degree + 1 < degrees) indices -= axes * width;
            for (int64_t index = 0; index < width; ++index) {
                Matrix<SIZE, float>& sum = level[index];
                if (degree + 1 == degrees)
                    std::fill_n(sum.values, sum.NUMEL, 0.0f);
                else
                    multiply(sum, factors[0], higher[indices[index]]);
                for (int64_t axis = 1; degree + 1 < degrees && axis < axes; ++axis)
                    multiply<false, true>(sum, factors[axis], higher[indices[axis * width + index]]);
                const float* moment =
                    moments + ((group * total + monomial + index) * blocks + block) * sizes.entries();
                const float coefficient = static_cast<float>(monomials.coefficients[degree]);
                with_exact_size<SIZE>(sizes.size, [&](auto n) INLINED {
                    for (int i = 0; i < n; ++i)
                        for (int j = i + 1; j < n; ++j) sum.row(i)[j] += coefficient * *moment++;
                });
                subtract_transpose(sum, spare);
            }
            std::swap(level, higher);
        }
        for (int64_t axis = 0; axis < axes; ++axis)
            higher[axis].write(out + (axis * count + work) * sizes.numel(), sizes.size);
    };
    return parallel_for<MomentsScratch<SIZE>>(count, 1, threads, compute, axes, widest);
}

}  // namespace

// Query and key rotated by blocks or planes, and the gradients of rotations, each in one pass over memory.
#pragma once

#include <utility>
#include <vector>

#include "matrix.h"

// As in cpu_interface.py. Strides over samples, heads and tokens.
struct Strides {
    int64_t sample, head, token;
    int64_t offset(int64_t b, int64_t h, int64_t n) const { return b * sample + h * head + n * token; }
};

// Query and key, or their gradients.
struct Pair {
    float* states[2];
    Strides strides[2];

    float* at(int which, int64_t sample, int64_t head, int64_t token) const {
        return states[which] + strides[which].offset(sample, head, token);
    }

    // Those of a token and head from a sample on, query and key in turn.
    void collect(std::vector<float*>& rows, int64_t sample, int64_t head, int64_t token) const {
        for (size_t row = 0; row < rows.size(); ++row) rows[row] = at(row % 2, sample + row / 2, head, token);
    }
};

// Rotations, or their gradients, with strides of zero over what samples or heads share.
struct Shared {
    float* values;
    Strides strides;
    float* at(int64_t b, int64_t h, int64_t n) const { return values + strides.offset(b, h, n); }
};

struct Shape {
    int64_t batch, heads, tokens, head_dim;
    // Blocks or planes, and 1 where all samples share a rotation.
    int64_t blocks, rotation_batch;

    // Samples that share a rotation, and how many rotations there are.
    int64_t samples() const { return rotation_batch > 1 ? 1 : batch; }
    int64_t rotations() const { return rotation_batch * tokens * heads; }
    // An equal part for each thread.
    int64_t chunk(int threads) const { return rotations() / threads + 1; }
};

namespace {

// The token and head of one of the shape's rotations, and the first sample it is for.
struct Place {
    int64_t first, head, token;
    Place(int64_t rotation, const Shape& shape)
        : first(rotation / shape.heads / shape.tokens),
          head(rotation % shape.heads),
          token(rotation / shape.heads % shape.tokens) {}
};

// The next matrix, if it is too large for the hardware to foresee.
INLINE void prefetch(const float* matrix) {
    constexpr int LINE = 64 / sizeof(float);
    if constexpr (SIZE >= 32)
        for (int i = 0; i < BLOCK_NUMEL; i += LINE) __builtin_prefetch(matrix + i);
}

using Rows = std::vector<float*>;
using Vector = Layout<float>::Vector;
constexpr int LANES = Layout<float>::LANES;

// The bytes of a vector that begins at this column of SIZE.
constexpr size_t bytes_at(int column) { return std::min(LANES, SIZE - column) * sizeof(float); }

// A tile of ROWS states, as rows, times a matrix.
template <int ROWS>
INLINE void multiply_rows(float* const* out, const float* const* states, const Matrix<float>& right) {
    for_columns<float>([&](auto columns, int column) INLINED {
        Vector sums[ROWS][columns] = {};
        add_products(
            sums, SIZE, [&](int k, int r) INLINED { return states[r][k]; },
            [&](int k, int c) INLINED { return load<Vector>(right.row(k) + column + c * LANES); });
        for (int r = 0; r < ROWS; ++r)
            for (int c = 0; c < columns; ++c)
                std::memcpy(out[r] + column + c * LANES, &sums[r][c], bytes_at(column + c * LANES));
    });
}

// An even number of states, as rows, times a matrix.
INLINE void multiply_all_rows(const Rows& out, const Rows& states, const Matrix<float>& right) {
    constexpr size_t ROWS = Layout<float>::MOST_ROWS;
    size_t row = 0;
    for (; row + ROWS <= states.size(); row += ROWS) multiply_rows<ROWS>(&out[row], &states[row], right);
    for (; row < states.size(); row += 2) multiply_rows<2>(&out[row], &states[row], right);
}

// out = Σ g rᵀ.
INLINE void sum_outer_products(Matrix<float>& out, const Rows& gradients, const Rows& states) {
    for_tiles<float>([&](auto rows, auto columns, int row, int column) INLINED {
        Vector sums[rows][columns] = {};
        add_products(
            sums, states.size(), [&](size_t k, int r) INLINED { return gradients[k][row + r]; },
            [&](size_t k, int c) INLINED {
                return load_part<Vector>(states[k] + column + c * LANES, bytes_at(column + c * LANES));
            });
        for (int r = 0; r < rows; ++r)
            for (int c = 0; c < columns; ++c) store(out.row(row + r) + column + c * LANES, sums[r][c]);
    });
}

INLINE void next_block(Rows& rows) {
    for (float*& row : rows) row += SIZE;
}

struct RotationScratch {
    Rows states, out;
    Matrix<float> right;
    explicit RotationScratch(int64_t rows) : states(rows), out(rows) {}
};

struct OuterScratch {
    Rows gradients, states, rotated_back;
    std::vector<float> memory;
    Matrix<float> outer, rotation, product;
    OuterScratch(int64_t rows, bool by_states) : gradients(rows), states(rows), memory(by_states ? rows * SIZE : 0) {
        for (size_t i = 0; i < memory.size(); i += SIZE) rotated_back.push_back(&memory[i]);
    }
};

typedef float Channels __attribute__((vector_size(VECTOR_BYTES)));
constexpr int CHANNELS = VECTOR_BYTES / static_cast<int>(sizeof(float));

// Calls body(channel, bytes) for the vectors that cover the channels below `width`.
template <typename Body>
INLINE void for_channels(int64_t width, Body body) {
    int64_t channel = 0;
    for (; channel + CHANNELS <= width; channel += CHANNELS) body(channel, sizeof(Channels));
    if (channel < width) body(channel, (width - channel) * sizeof(float));
}

// Each pair (x₀, x₁) replaced by (x_EVEN, x_ODD).
template <int EVEN, int ODD, int... INDICES>
INLINE Channels pairwise(Channels vector, std::integer_sequence<int, INDICES...>) {
    return shuffle<(INDICES % 2 ? INDICES - 1 + ODD : INDICES + EVEN)...>(vector, vector);
}

template <int EVEN, int ODD>
INLINE Channels pairwise(Channels vector) {
    return pairwise<EVEN, ODD>(vector, std::make_integer_sequence<int, CHANNELS>{});
}

}  // namespace

extern "C" {

// cpu.apply_rotation for blocks: those of a token and head at a time, for all samples that share them.
int hf_liere_rotate_blocks(const Shape* shape, const Pair* states, const Pair* out, const Shared* rotation,
                           int inverse, int threads) {
    const int64_t width = shape->blocks * SIZE, rows = 2 * shape->samples();
    const auto rotate = [&](int64_t work, RotationScratch& scratch) {
        const auto [first, head, token] = Place(work, *shape);
        states->collect(scratch.states, first, head, token);
        out->collect(scratch.out, first, head, token);
        for (int64_t row = 0; row < rows; ++row)
            std::copy(scratch.states[row] + width, scratch.states[row] + shape->head_dim, scratch.out[row] + width);
        const float* source = rotation->at(first, head, token);
        for (int64_t block = 0; block < shape->blocks; ++block, source += BLOCK_NUMEL) {
            // States are rows: they are multiplied by Rᵀ, and by R for the inverse.
            if (inverse)
                scratch.right.read(source);
            else
                scratch.right.read_transposed(source);
            prefetch(source + BLOCK_NUMEL);
            multiply_all_rows(scratch.out, scratch.states, scratch.right);
            next_block(scratch.states);
            next_block(scratch.out);
        }
    };
    return parallel_for<RotationScratch>(shape->rotations(), shape->chunk(threads), threads, rotate, rows);
}

// cpu.outer_products, likewise; `rotation` may be null.
int hf_liere_outer_products(const Shape* shape, const Pair* gradients, const Pair* states, const Shared* out,
                            const Shared* rotation, int threads) {
    const int64_t rows = 2 * shape->samples();
    // For few states it is cheaper to rotate each of them back: (Σ g rᵀ) R = Σ g (Rᵀ r)ᵀ.
    const bool by_states = rotation && rows < SIZE;
    const auto compute = [&](int64_t work, OuterScratch& scratch) {
        const auto [first, head, token] = Place(work, *shape);
        gradients->collect(scratch.gradients, first, head, token);
        states->collect(scratch.states, first, head, token);
        float* target = out->at(first, head, token);
        const float* source = rotation ? rotation->at(first, head, token) : nullptr;
        for (int64_t block = 0; block < shape->blocks; ++block, target += BLOCK_NUMEL) {
            if (rotation) {
                scratch.rotation.read(source + block * BLOCK_NUMEL);
                prefetch(source + (block + 1) * BLOCK_NUMEL);
            }
            if (by_states) multiply_all_rows(scratch.rotated_back, scratch.states, scratch.rotation);
            sum_outer_products(scratch.outer, scratch.gradients, by_states ? scratch.rotated_back : scratch.states);
            if (rotation && !by_states) multiply(scratch.product, scratch.outer, scratch.rotation);
            (rotation && !by_states ? scratch.product : scratch.outer).write(target);
            next_block(scratch.gradients);
            next_block(scratch.states);
        }
    };
    return parallel_for<OuterScratch>(shape->rotations(), shape->chunk(threads), threads, compute, rows, by_states);
}

// cpu.apply_rotation for planes: a token of a sample at a time.
int hf_liere_rotate_planes(const Shape* shape, const Pair* states, const Pair* out, const Shared* cos_sin, int inverse,
                           int threads) {
    const int64_t width = 2 * shape->blocks;
    Channels signs;
    for (int i = 0; i < CHANNELS; ++i) signs[i] = (i % 2 == 0) == (inverse == 0) ? -1.0f : 1.0f;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t work = 0; work < shape->batch * shape->tokens; ++work) {
        const int64_t sample = work / shape->tokens, token = work % shape->tokens;
        for (int which = 0; which < 2; ++which)
            for (int64_t head = 0; head < shape->heads; ++head) {
                const float* from = states->at(which, sample, head, token);
                float* to = out->at(which, sample, head, token);
                const float* angles = cos_sin->at(sample, head, token);
                for_channels(width, [&](int64_t i, size_t bytes) INLINED {
                    const Channels x = load_part<Channels>(from + i, bytes);
                    const Channels angle = load_part<Channels>(angles + i, bytes);
                    const Channels cos = pairwise<0, 0>(angle), sin = signs * pairwise<1, 1>(angle);
                    const Channels rotated = x * cos + pairwise<1, 0>(x) * sin;
                    std::memcpy(to + i, &rotated, bytes);
                });
                std::copy(from + width, from + shape->head_dim, to + width);
            }
    }
    return true;
}

// cpu.angle_gradients: a token and head at a time.
int hf_liere_angle_gradients(const Shape* shape, const Pair* gradients, const Pair* states, const Shared* out,
                             int threads) {
    const int64_t samples = shape->samples(), width = 2 * shape->blocks;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t work = 0; work < shape->rotations(); ++work) {
        const Place place(work, *shape);
        const int64_t first = place.first, head = place.head, token = place.token;
        float* target = out->at(first, head, token);
        for_channels(width, [=](int64_t i, size_t bytes) INLINED {
            Channels products = {};
            for (int64_t sample = first; sample < first + samples; ++sample)
                for (int which = 0; which < 2; ++which)
                    products += pairwise<1, 0>(load_part<Channels>(gradients->at(which, sample, head, token) + i, bytes)) *
                                load_part<Channels>(states->at(which, sample, head, token) + i, bytes);
            const int planes = bytes / (2 * sizeof(float));
            for (int plane = 0; plane < planes; ++plane)
                target[i / 2 + plane] = products[2 * plane] - products[2 * plane + 1];
        });
    }
    return true;
}

}  // extern "C"

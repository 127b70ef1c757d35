// Query and key rotated by blocks or planes, and the gradients of rotations, each in one pass over memory. States are
// float32 or bfloat16; everything else is float32.
#pragma once

#include <utility>
#include <vector>

#include "matrix.h"

// The same structures as in cpu_library.py. Strides over samples, heads and tokens.
struct Strides {
    int64_t sample, head, token;
    int64_t offset(int64_t b, int64_t h, int64_t n) const { return b * sample + h * head + n * token; }
};

// Query and key, or their gradients; or only one of them.
struct Pair {
    void* states[2];
    Strides strides[2];

    template <typename State>
    State* at(int which, int64_t sample, int64_t head, int64_t token) const {
        return static_cast<State*>(states[which]) + strides[which].offset(sample, head, token);
    }
};

// Rotations, or their gradients, with zero strides over samples or heads that share them.
struct Shared {
    float* values;
    Strides strides;
    float* at(int64_t b, int64_t h, int64_t n) const { return values + strides.offset(b, h, n); }
};

struct Shape {
    int64_t batch, heads, tokens, head_dim;
    // Number of blocks or planes; 1 if all samples share a rotation; size of a block, 2 for planes.
    int64_t blocks, rotation_batch, size;
    // Otherwise states are float32.
    int64_t is_bfloat16;
    // 2 for query and key, 1 for one of them.
    int64_t states;

    // Rotated channels of the states.
    int64_t width() const { return blocks * size; }
    // Number of samples that share a rotation, and number of rotations.
    int64_t samples() const { return rotation_batch > 1 ? 1 : batch; }
    // Rows that share a rotation.
    int64_t rows() const { return states * samples(); }
    int64_t rotations() const { return rotation_batch * tokens * heads; }
    // An equal part for each thread.
    int64_t chunk(int threads) const { return rotations() / threads + 1; }
};

namespace {

// Channels by which reading is ahead of work: more states share a rotation than the hardware follows.
constexpr int AHEAD = 128;

// The upper half of a float32.
struct BFloat16 {
    uint16_t bits;

    BFloat16() = default;

    // Rounds to the nearest, ties to even; NaN stays NaN.
    BFloat16(float value) {
        uint32_t wide;
        std::memcpy(&wide, &value, sizeof(wide));
        const uint32_t rounded = (wide + 0x7fff + (wide >> 16 & 1)) >> 16, quiet = wide >> 16 | 0x40;
        bits = static_cast<uint16_t>((wide & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
    }

    operator float() const {
        const uint32_t wide = static_cast<uint32_t>(bits) << 16;
        float value;
        std::memcpy(&value, &wide, sizeof(value));
        return value;
    }
};

// The token and head of one of the shape's rotations, and its first sample.
struct Place {
    int64_t first, head, token;
    Place(int64_t rotation, const Shape& shape)
        : first(rotation / shape.heads / shape.tokens),
          head(rotation % shape.heads),
          token(rotation / shape.heads % shape.tokens) {}
};

// Copies the channels beyond the last plane or block of all states that share a rotation.
template <typename State>
void pass_on(const Shape& shape, const Pair& states, const Pair& out, const Place& place) {
    const int64_t width = shape.width();
    if (width == shape.head_dim) return;
    for (int64_t sample = place.first; sample < place.first + shape.samples(); ++sample)
        for (int which = 0; which < shape.states; ++which) {
            const State* from = states.at<State>(which, sample, place.head, place.token);
            std::copy(from + width, from + shape.head_dim, out.at<State>(which, sample, place.head, place.token) + width);
        }
}

// The rows of query and key, in memory, of the samples that share a rotation, block by block.
template <int SIZE_>
struct Rows {
    static constexpr int SIZE = SIZE_;
    using State = float;
    // For products.
    std::vector<float*> values;
    int64_t states;

    explicit Rows(const Shape& shape) : values(shape.rows()), states(shape.states) {}

    void start(const Pair& pair, const Place& place) {
        size_t row = 0;
        for (int64_t sample = place.first; row < values.size(); ++sample)
            for (int64_t which = 0; which < states; ++which)
                values[row++] = pair.at<float>(which, sample, place.head, place.token);
    }

    void read() {}
    void write() {}

    INLINE void next() {
        for (float*& row : values) {
            __builtin_prefetch(row + AHEAD);
            row += SIZE;
        }
    }
};

// The same rows as float32 copies, padded with zeros.
template <int SIZE_, typename State_>
struct CopiedRows {
    static constexpr int SIZE = SIZE_;
    using State = State_;
    std::vector<float*> values;
    std::vector<float> copies;
    std::vector<State*> memory;
    int64_t size, states;

    explicit CopiedRows(const Shape& shape)
        : values(shape.rows()),
          copies(values.size() * SIZE),
          memory(values.size()),
          size(shape.size),
          states(shape.states) {
        for (size_t row = 0; row < values.size(); ++row) values[row] = &copies[row * SIZE];
    }

    void start(const Pair& pair, const Place& place) {
        size_t row = 0;
        for (int64_t sample = place.first; row < memory.size(); ++sample)
            for (int64_t which = 0; which < states; ++which)
                memory[row++] = pair.at<State>(which, sample, place.head, place.token);
    }

    void read() {
        with_exact_size<SIZE>(size, [&](auto n) INLINED {
            for (size_t row = 0; row < memory.size(); ++row)
                for (int i = 0; i < n; ++i) values[row][i] = memory[row][i];
        });
    }

    void write() {
        with_exact_size<SIZE>(size, [&](auto n) INLINED {
            for (size_t row = 0; row < memory.size(); ++row)
                for (int i = 0; i < n; ++i) memory[row][i] = values[row][i];
        });
    }

    void next() {
        for (State*& row : memory) {
            __builtin_prefetch(row + AHEAD);
            row += size;
        }
    }
};

// Prefetches the next matrix if it is too large for the hardware prefetcher.
template <int SIZE>
INLINE void prefetch(const float* matrix, int64_t numel) {
    constexpr int LINE = 64 / sizeof(float);
    if constexpr (SIZE >= 32)
        for (int64_t i = 0; i < numel; i += LINE) __builtin_prefetch(matrix + i);
}

// A tile of ROWS states, as rows, times a matrix.
template <int ROWS, int SIZE>
INLINE void multiply_rows(float* const* out, const float* const* states, const Matrix<SIZE, float>& right) {
    using L = Layout<SIZE, float>;
    using Vector = typename L::Vector;
    for_columns<SIZE, float>([&](auto columns, int column) INLINED {
        Vector sums[ROWS][columns] = {};
        add_products(
            sums, SIZE, [&](int k, int r) INLINED { return states[r][k]; },
            [&](int k, int c) INLINED { return load<Vector>(right.row(k) + column + c * L::LANES); });
        for (int r = 0; r < ROWS; ++r)
            for (int c = 0; c < columns; ++c) store(out[r] + column + c * L::LANES, sums[r][c]);
    });
}

// All states, as rows, times a matrix.
template <int SIZE>
INLINE void multiply_all_rows(const std::vector<float*>& out, const std::vector<float*>& states,
                              const Matrix<SIZE, float>& right) {
    constexpr size_t ROWS = Layout<SIZE, float>::MOST_ROWS;
    size_t row = 0;
    for (; row + ROWS <= states.size(); row += ROWS) multiply_rows<ROWS>(&out[row], &states[row], right);
    for (; row + 2 <= states.size(); row += 2) multiply_rows<2>(&out[row], &states[row], right);
    if (row < states.size()) multiply_rows<1>(&out[row], &states[row], right);
}

// out = Σ g rᵀ.
template <int SIZE>
INLINE void sum_outer_products(Matrix<SIZE, float>& out, const std::vector<float*>& gradients,
                               const std::vector<float*>& states) {
    using L = Layout<SIZE, float>;
    using Vector = typename L::Vector;
    for_tiles<SIZE, float>([&](auto rows, auto columns, int row, int column) INLINED {
        Vector sums[rows][columns] = {};
        add_products(
            sums, states.size(), [&](size_t k, int r) INLINED { return gradients[k][row + r]; },
            [&](size_t k, int c) INLINED { return load<Vector>(states[k] + column + c * L::LANES); });
        for (int r = 0; r < rows; ++r)
            for (int c = 0; c < columns; ++c) store(out.row(row + r) + column + c * L::LANES, sums[r][c]);
    });
}

template <typename Rows>
struct RotationScratch {
    Rows states, out;
    Matrix<Rows::SIZE, float> right;
    explicit RotationScratch(const Shape& shape) : states(shape), out(shape) {}
};

template <typename Rows>
struct OuterScratch {
    static constexpr int SIZE = Rows::SIZE;
    Rows gradients, states;
    std::vector<float> memory;
    std::vector<float*> rotated_back;
    Matrix<SIZE, float> outer, rotation, product;
    OuterScratch(const Shape& shape, bool by_states)
        : gradients(shape), states(shape), memory(by_states ? states.values.size() * SIZE : 0) {
        for (size_t i = 0; i < memory.size(); i += SIZE) rotated_back.push_back(&memory[i]);
    }
};

// cpu.apply_rotation for blocks: the blocks of one token and head at a time, for all samples that share them.
template <typename Rows>
bool rotate_blocks(const Shape& shape, const Pair& states, const Pair& out, const Shared& rotation, bool inverse,
                   int threads) {
    using State = typename Rows::State;
    const int64_t numel = shape.size * shape.size;
    const auto rotate = [&](int64_t work, RotationScratch<Rows>& scratch) {
        const Place place(work, shape);
        pass_on<State>(shape, states, out, place);
        scratch.states.start(states, place);
        scratch.out.start(out, place);
        const float* source = rotation.at(place.first, place.head, place.token);
        for (int64_t block = 0; block < shape.blocks; ++block, source += numel) {
            // States are rows: multiply them by Rᵀ, or by R for the inverse.
            if (inverse)
                scratch.right.read(source, shape.size);
            else
                scratch.right.read_transposed(source, shape.size);
            prefetch<Rows::SIZE>(source + numel, numel);
            scratch.states.read();
            multiply_all_rows(scratch.out.values, scratch.states.values, scratch.right);
            scratch.out.write();
            scratch.states.next();
            scratch.out.next();
        }
    };
    return parallel_for<RotationScratch<Rows>>(shape.rotations(), shape.chunk(threads), threads, rotate, shape);
}

// cpu.outer_products, likewise; `rotation` may be null.
template <typename Rows>
bool outer_products(const Shape& shape, const Pair& gradients, const Pair& states, const Shared& out,
                    const Shared* rotation, int threads) {
    const int64_t numel = shape.size * shape.size;
    // For few states it is cheaper to rotate each one back: (Σ g rᵀ) R = Σ g (Rᵀ r)ᵀ.
    const bool by_states = rotation && shape.rows() < Rows::SIZE;
    const auto compute = [&](int64_t work, OuterScratch<Rows>& scratch) {
        const Place place(work, shape);
        scratch.gradients.start(gradients, place);
        scratch.states.start(states, place);
        float* target = out.at(place.first, place.head, place.token);
        const float* source = rotation ? rotation->at(place.first, place.head, place.token) : nullptr;
        for (int64_t block = 0; block < shape.blocks; ++block, target += numel) {
            if (rotation) {
                scratch.rotation.read(source + block * numel, shape.size);
                prefetch<Rows::SIZE>(source + (block + 1) * numel, numel);
            }
            scratch.gradients.read();
            scratch.states.read();
            if (by_states) multiply_all_rows(scratch.rotated_back, scratch.states.values, scratch.rotation);
            sum_outer_products(scratch.outer, scratch.gradients.values,
                               by_states ? scratch.rotated_back : scratch.states.values);
            if (rotation && !by_states) multiply(scratch.product, scratch.outer, scratch.rotation);
            (rotation && !by_states ? scratch.product : scratch.outer).write(target, shape.size);
            scratch.gradients.next();
            scratch.states.next();
        }
    };
    return parallel_for<OuterScratch<Rows>>(
        shape.rotations(), shape.chunk(threads), threads, compute, shape, by_states);
}

}  // namespace

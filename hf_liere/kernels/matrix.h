// Vectors, b × b matrices that are multiplied in tiles of registers, and loops over threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;
#elif defined(__AVX__)
constexpr int VECTOR_BYTES = 32;
#else
constexpr int VECTOR_BYTES = 16;
#endif

#define INLINED __attribute__((always_inline))
#define INLINE inline INLINED

namespace {

constexpr int SIZE = BLOCK_SIZE;
constexpr int BLOCK_NUMEL = SIZE * SIZE;
// Above the diagonal.
constexpr int ENTRIES = SIZE * (SIZE - 1) / 2;

constexpr int power_of_two_from(int least) { return least <= 1 ? 1 : 2 * power_of_two_from((least + 1) / 2); }

// How matrices of T are stored and multiplied.
template <typename T>
struct Layout {
    static constexpr int LANES = std::min(VECTOR_BYTES / static_cast<int>(sizeof(T)), power_of_two_from(SIZE));
    static constexpr int VECTORS = (SIZE + LANES - 1) / LANES;
    static constexpr int STRIDE = VECTORS * LANES;
    typedef T Vector __attribute__((vector_size(LANES * sizeof(T))));
    // At most 16 sums per tile leave registers for their factors.
    static constexpr int TILE_COLUMNS = std::min(VECTORS, 4);
    static constexpr int MOST_ROWS = TILE_COLUMNS <= 2 ? 8 : 4;
    static constexpr int TILE_ROWS = std::min(SIZE, MOST_ROWS);
};

template <typename Vector, typename T>
INLINE Vector load(const T* source) {
    Vector vector;
    std::memcpy(&vector, source, sizeof(Vector));
    return vector;
}

// With zeros behind the first `bytes`.
template <typename Vector, typename T>
INLINE Vector load_part(const T* source, size_t bytes) {
    Vector vector = {};
    std::memcpy(&vector, source, bytes);
    return vector;
}

template <typename Vector, typename T>
INLINE void store(T* target, Vector vector) {
    std::memcpy(target, &vector, sizeof(Vector));
}

// The elements of two vectors, one after the other, at these indices. GCC has __builtin_shufflevector since version 12
// only, and clang has no __builtin_shuffle.
template <int... INDICES, typename Vector>
INLINE Vector shuffle(Vector first, Vector second) {
#ifdef __clang__
    return __builtin_shufflevector(first, second, INDICES...);
#else
    using Integer = std::conditional_t<sizeof(Vector) / sizeof...(INDICES) == 8, int64_t, int32_t>;
    typedef Integer Integers __attribute__((vector_size(sizeof(Vector))));
    return __builtin_shuffle(first, second, Integers{INDICES...});
#endif
}

// 8 × 8, in registers, by swapping halves, quarters and pairs; times `sign`.
template <typename T>
INLINE void transpose_square(T* target, int target_stride, const T* source, int stride, T sign = 1) {
    typedef T Eight __attribute__((vector_size(8 * sizeof(T))));
    Eight a[8], b[8];
    for (int k = 0; k < 8; ++k) a[k] = load<Eight>(source + k * stride);
    for (int k = 0; k < 4; ++k) {
        b[k] = shuffle<0, 1, 2, 3, 8, 9, 10, 11>(a[k], a[k + 4]);
        b[k + 4] = shuffle<4, 5, 6, 7, 12, 13, 14, 15>(a[k], a[k + 4]);
    }
    for (int k : {0, 1, 4, 5}) {
        a[k] = shuffle<0, 1, 8, 9, 4, 5, 12, 13>(b[k], b[k + 2]);
        a[k + 2] = shuffle<2, 3, 10, 11, 6, 7, 14, 15>(b[k], b[k + 2]);
    }
    for (int k : {0, 2, 4, 6}) {
        b[k] = shuffle<0, 8, 2, 10, 4, 12, 6, 14>(a[k], a[k + 1]);
        b[k + 1] = shuffle<1, 9, 3, 11, 5, 13, 7, 15>(a[k], a[k + 1]);
    }
    for (int k = 0; k < 8; ++k) store(target + k * target_stride, sign * b[k]);
}

// SIZE rows, each padded with zeros to whole vectors.
template <typename T>
struct alignas(VECTOR_BYTES) Matrix {
    static constexpr int STRIDE = Layout<T>::STRIDE, NUMEL = SIZE * STRIDE;
    T values[NUMEL];

    T* row(int index) { return values + index * STRIDE; }
    const T* row(int index) const { return values + index * STRIDE; }

    INLINE Matrix& operator+=(const Matrix& other) {
        for (int i = 0; i < NUMEL; ++i) values[i] += other.values[i];
        return *this;
    }

    template <typename Source>
    INLINE void read(const Source* source) {
        for (int i = 0; i < SIZE; ++i) {
            for (int j = 0; j < SIZE; ++j) row(i)[j] = static_cast<T>(source[i * SIZE + j]);
            for (int j = SIZE; j < STRIDE; ++j) row(i)[j] = 0;
        }
    }

    template <typename Target>
    INLINE void write(Target* target) const {
        for (int i = 0; i < SIZE; ++i)
            for (int j = 0; j < SIZE; ++j) target[i * SIZE + j] = static_cast<Target>(row(i)[j]);
    }

    INLINE void read_transposed(const T* source, int stride = SIZE) {
        if constexpr (SIZE % 8 == 0) {
            for (int i = 0; i < SIZE; i += 8)
                for (int j = 0; j < SIZE; j += 8) transpose_square(row(j) + i, STRIDE, source + i * stride + j, stride);
        } else {
            for (int i = 0; i < SIZE; ++i)
                for (int j = 0; j < SIZE; ++j) row(j)[i] = source[i * stride + j];
        }
        for (int i = 0; i < SIZE; ++i)
            for (int j = SIZE; j < STRIDE; ++j) row(i)[j] = 0;
    }
};

// Calls body(columns, column) for the tiles beside one another that cover a row: their width in vectors, which the
// compiler knows, and their first column.
template <typename T, int VECTOR = 0, typename Body>
INLINE void for_columns(Body body) {
    using L = Layout<T>;
    if constexpr (VECTOR < L::VECTORS) {
        constexpr int COLUMNS = std::min(L::TILE_COLUMNS, L::VECTORS - VECTOR);
        body(std::integral_constant<int, COLUMNS>{}, VECTOR * L::LANES);
        for_columns<T, VECTOR + COLUMNS>(body);
    }
}

// Calls body(rows, columns, row, column) for the tiles that cover a matrix.
template <typename T, typename Body>
INLINE void for_tiles(Body body) {
    constexpr int ROWS = Layout<T>::TILE_ROWS, REST = SIZE % ROWS;
    for_columns<T>([&](auto columns, int column) INLINED {
        for (int row = 0; row + ROWS <= SIZE; row += ROWS)
            body(std::integral_constant<int, ROWS>{}, columns, row, column);
        if constexpr (REST > 0) body(std::integral_constant<int, REST>{}, columns, SIZE - REST, column);
    });
}

// sums[r][c] += Σ left(k, r) · right(k, c) over k below `terms`: numbers times vectors.
template <typename Vector, int ROWS, int COLUMNS, typename Count, typename Left, typename Right>
INLINE void add_products(Vector (&sums)[ROWS][COLUMNS], Count terms, Left left, Right right) {
#pragma GCC unroll 4
    for (Count k = 0; k < terms; ++k) {
        Vector factors[COLUMNS];
        for (int c = 0; c < COLUMNS; ++c) factors[c] = right(k, c);
        for (int r = 0; r < ROWS; ++r)
            for (int c = 0; c < COLUMNS; ++c) sums[r][c] += left(k, r) * factors[c];
    }
}

// A tile of left · right or of leftᵀ · right, or of what is there plus that.
template <typename T, bool TRANSPOSED, bool ADD, int ROWS, int COLUMNS>
INLINE void multiply_tile(T* out, const T* left, const T* right) {
    using L = Layout<T>;
    using Vector = typename L::Vector;
    Vector sums[ROWS][COLUMNS];
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < COLUMNS; ++c)
            sums[r][c] = ADD ? load<Vector>(out + r * L::STRIDE + c * L::LANES) : Vector{};
    add_products(
        sums, SIZE,
        [&](int k, int r) INLINED { return TRANSPOSED ? left[k * L::STRIDE + r] : left[r * L::STRIDE + k]; },
        [&](int k, int c) INLINED { return load<Vector>(right + k * L::STRIDE + c * L::LANES); });
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < COLUMNS; ++c) store(out + r * L::STRIDE + c * L::LANES, sums[r][c]);
}

// out = left · right, or leftᵀ · right, or is added to.
template <bool TRANSPOSED = false, bool ADD = false, typename T>
void multiply(Matrix<T>& out, const Matrix<T>& left, const Matrix<T>& right) {
    for_tiles<T>([&](auto rows, auto columns, int row, int column) INLINED {
        multiply_tile<T, TRANSPOSED, ADD, rows, columns>(
            out.row(row) + column, TRANSPOSED ? left.values + row : left.row(row), right.values + column);
    });
}

// left · right, or what is there plus that, where the result is symmetric (SIGN 1) or skew-symmetric (SIGN −1): the
// tiles that touch the lower triangle, and their mirror images.
template <int SIGN, bool ADD = false, typename T>
void multiply_half(Matrix<T>& out, const Matrix<T>& left, const Matrix<T>& right) {
    using L = Layout<T>;
    constexpr int ROWS = 8, COLUMNS = std::max(1, 16 / L::LANES), WIDTH = COLUMNS * L::LANES;
    if constexpr (SIZE % WIDTH || SIZE < 2 * WIDTH) {
        multiply<false, ADD>(out, left, right);
    } else {
        for (int column = 0; column < SIZE; column += WIDTH)
            for (int row = column; row < SIZE; row += ROWS)
                multiply_tile<T, false, ADD, ROWS, COLUMNS>(
                    out.row(row) + column, left.row(row), right.values + column);
        // The squares on the diagonal are complete.
        for (int row = 0; row < SIZE; row += 8)
            for (int column = row + 8; column < SIZE; column += 8)
                transpose_square(out.row(row) + column, L::STRIDE, out.row(column) + row, L::STRIDE, T(SIGN));
    }
}

// M − Mᵀ in place of M.
INLINE void subtract_transpose(Matrix<float>& matrix, Matrix<float>& spare) {
    spare.read_transposed(matrix.values, Matrix<float>::STRIDE);
    for (int i = 0; i < Matrix<float>::NUMEL; ++i) matrix.values[i] -= spare.values[i];
}

// Calls body(index, scratch) for every index below `count`; a thread takes `chunk` of them at once and has a Scratch of
// its own, made from the arguments. Returns whether there was memory for them: an exception that leaves a parallel
// region would end the process.
template <typename Scratch, typename Body, typename... Arguments>
bool parallel_for(int64_t count, int64_t chunk, int threads, Body body, Arguments... arguments) {
    std::atomic<bool> enough_memory{true};
#pragma omp parallel num_threads(threads)
    {
        std::unique_ptr<Scratch> scratch;
        try {
            scratch = std::make_unique<Scratch>(arguments...);
        } catch (const std::bad_alloc&) {
            enough_memory = false;
        }
#pragma omp for schedule(dynamic, chunk)
        for (int64_t index = 0; index < count; ++index)
            if (enough_memory) body(index, *scratch);
    }
    return enough_memory;
}

}  // namespace

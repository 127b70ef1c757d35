// Vectors, b × b matrices multiplied in register tiles, and loops over threads.
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

// Number of vectors of sums that leaves enough registers for their factors.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int MOST_SUMS = 16;
#else
constexpr int MOST_SUMS = 8;
#endif

#define INLINED __attribute__((always_inline))
#define INLINE inline INLINED

namespace {

// Code is compiled for block sizes 4, 8, …; blocks of other sizes use the next larger one.
constexpr int SMALLEST_SIZE = 4, LARGEST_SIZE = 128;

// Returns body(SIZE) with the smallest sufficient compiled size as a constant; false if there is none.
template <int SIZE = SMALLEST_SIZE, typename Body>
bool with_compiled_size(int64_t size, Body body) {
    if (size <= SIZE) return body(std::integral_constant<int, SIZE>{});
    if constexpr (SIZE < LARGEST_SIZE) return with_compiled_size<2 * SIZE>(size, body);
    return false;
}

// Calls body(size), with a constant size for blocks without padding.
template <int SIZE, typename Body>
INLINE void with_exact_size(int64_t size, Body body) {
    if (size == SIZE)
        body(std::integral_constant<int, SIZE>{});
    else
        body(static_cast<int>(size));
}

// How matrices of T are multiplied.
template <int SIZE, typename T>
struct Layout {
    static constexpr int LANES = std::min(VECTOR_BYTES / static_cast<int>(sizeof(T)), SIZE);
    static constexpr int VECTORS = SIZE / LANES;
    typedef T Vector __attribute__((vector_size(LANES * sizeof(T))));
    static constexpr int TILE_COLUMNS = std::min(VECTORS, MOST_SUMS / 4);
    static constexpr int MOST_ROWS = 8 * TILE_COLUMNS <= MOST_SUMS ? 8 : 4;
    static constexpr int TILE_ROWS = std::min(SIZE, MOST_ROWS);
};

template <typename Vector, typename T>
INLINE Vector load(const T* source) {
    Vector vector;
    std::memcpy(&vector, source, sizeof(Vector));
    return vector;
}

// Loads `bytes` and fills the rest with zeros.
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

// Elements of two concatenated vectors at these indices. GCC has __builtin_shufflevector only since version 12, and
// clang lacks __builtin_shuffle.
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

// Transposes 8 × 8 in registers by swapping halves, quarters and pairs, and multiplies by `sign`.
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

// Copies whole vectors; for loops that may overlap, compilers call functions instead.
template <int SIZE, typename Target, typename Source>
INLINE void copy_vectors(Target* target, const Source* source, int count) {
    constexpr int LANES = Layout<SIZE, Source>::LANES;
    typedef Target Vector __attribute__((vector_size(LANES * sizeof(Target))));
    for (int i = 0; i < count; i += LANES)
        store(target + i, __builtin_convertvector(load<typename Layout<SIZE, Source>::Vector>(source + i), Vector));
}

// A block, padded with zeros to SIZE rows and columns.
template <int SIZE, typename T>
struct alignas(VECTOR_BYTES) Matrix {
    static constexpr int NUMEL = SIZE * SIZE;
    T values[NUMEL];

    T* row(int index) { return values + index * SIZE; }
    const T* row(int index) const { return values + index * SIZE; }

    INLINE Matrix& operator+=(const Matrix& other) {
        for (int i = 0; i < NUMEL; ++i) values[i] += other.values[i];
        return *this;
    }

    INLINE void clear_padding(int64_t size) {
        if (size < SIZE) std::fill_n(values, NUMEL, T(0));
    }

    // Loads a block of `size` rows from memory.
    INLINE void read(const T* source, int64_t size) {
        if (size == SIZE) {
            copy_vectors<SIZE>(values, source, NUMEL);
            return;
        }
        std::fill_n(values, NUMEL, T(0));
        for (int64_t i = 0; i < size; ++i) std::copy_n(source + i * size, size, row(i));
    }

    template <typename Target>
    INLINE void write(Target* target, int64_t size) const {
        if (size == SIZE) {
            copy_vectors<SIZE>(target, values, NUMEL);
            return;
        }
        for (int64_t i = 0; i < size; ++i) std::copy_n(row(i), size, target + i * size);
    }

    INLINE void read_transposed(const T* source, int64_t size) {
        if constexpr (SIZE % 8 == 0)
            if (size == SIZE) {
                for (int i = 0; i < SIZE; i += 8)
                    for (int j = 0; j < SIZE; j += 8) transpose_square(row(j) + i, SIZE, source + i * SIZE + j, SIZE);
                return;
            }
        clear_padding(size);
        with_exact_size<SIZE>(size, [&](auto n) INLINED {
            for (int i = 0; i < n; ++i)
                for (int j = 0; j < n; ++j) row(j)[i] = source[i * n + j];
        });
    }
};

// Calls body(columns, column) for the adjacent tiles that cover a row, with their compile-time width in vectors and
// first column.
template <int SIZE, typename T, typename Body>
INLINE void for_columns(Body body) {
    using L = Layout<SIZE, T>;
    for (int column = 0; column < SIZE; column += L::TILE_COLUMNS * L::LANES)
        body(std::integral_constant<int, L::TILE_COLUMNS>{}, column);
}

// Calls body(rows, columns, row, column) for the tiles that cover a matrix.
template <int SIZE, typename T, typename Body>
INLINE void for_tiles(Body body) {
    constexpr int ROWS = Layout<SIZE, T>::TILE_ROWS;
    for_columns<SIZE, T>([&](auto columns, int column) INLINED {
        for (int row = 0; row < SIZE; row += ROWS) body(std::integral_constant<int, ROWS>{}, columns, row, column);
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

// Sets a tile to left · right or leftᵀ · right, or adds that to it.
template <int SIZE, bool TRANSPOSED, bool ADD, int ROWS, int COLUMNS, typename T>
INLINE void multiply_tile(T* out, const T* left, const T* right) {
    using L = Layout<SIZE, T>;
    using Vector = typename L::Vector;
    Vector sums[ROWS][COLUMNS];
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < COLUMNS; ++c)
            sums[r][c] = ADD ? load<Vector>(out + r * SIZE + c * L::LANES) : Vector{};
    add_products(
        sums, SIZE,
        [&](int k, int r) INLINED { return TRANSPOSED ? left[k * SIZE + r] : left[r * SIZE + k]; },
        [&](int k, int c) INLINED { return load<Vector>(right + k * SIZE + c * L::LANES); });
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < COLUMNS; ++c) store(out + r * SIZE + c * L::LANES, sums[r][c]);
}

// out = left · right or leftᵀ · right, or out += the same.
template <bool TRANSPOSED = false, bool ADD = false, int SIZE, typename T>
void multiply(Matrix<SIZE, T>& out, const Matrix<SIZE, T>& left, const Matrix<SIZE, T>& right) {
    for_tiles<SIZE, T>([&](auto rows, auto columns, int row, int column) INLINED {
        multiply_tile<SIZE, TRANSPOSED, ADD, rows, columns>(
            out.row(row) + column, TRANSPOSED ? left.values + row : left.row(row), right.values + column);
    });
}

// out = left · right, or out += the same, for a symmetric (SIGN 1) or skew-symmetric (SIGN −1) result: computes the
// tiles that touch the lower triangle, and mirrors them.
template <int SIGN, bool ADD = false, int SIZE, typename T>
void multiply_half(Matrix<SIZE, T>& out, const Matrix<SIZE, T>& left, const Matrix<SIZE, T>& right) {
    using L = Layout<SIZE, T>;
    constexpr int COLUMNS = std::max(1, MOST_SUMS / L::LANES), WIDTH = COLUMNS * L::LANES;
    constexpr int ROWS = std::min(8, MOST_SUMS / COLUMNS);
    if constexpr (SIZE % WIDTH || SIZE < 2 * WIDTH) {
        multiply<false, ADD>(out, left, right);
    } else {
        for (int column = 0; column < SIZE; column += WIDTH)
            for (int row = column; row < SIZE; row += ROWS)
                multiply_tile<SIZE, false, ADD, ROWS, COLUMNS>(
                    out.row(row) + column, left.row(row), right.values + column);
        // The squares on the diagonal are complete.
        for (int row = 0; row < SIZE; row += 8)
            for (int column = row + 8; column < SIZE; column += 8)
                transpose_square(out.row(row) + column, SIZE, out.row(column) + row, SIZE, T(SIGN));
    }
}

// Replaces M by M − Mᵀ.
template <int SIZE>
INLINE void subtract_transpose(Matrix<SIZE, float>& matrix, Matrix<SIZE, float>& spare) {
    spare.read_transposed(matrix.values, SIZE);
    for (int i = 0; i < spare.NUMEL; ++i) matrix.values[i] -= spare.values[i];
}

// Calls body(index, scratch) for every index below `count`; a thread takes `chunk` indices at a time and has its own
// Scratch, constructed from the arguments. Returns false if memory ran out, because an exception that leaves a parallel
// region would abort the process.
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

// Loops of cpu_kernels.py, compiled for one block size b (BLOCK_SIZE) and the machine it runs on.
//
// Small matrices are kept row by row, each row padded to whole vectors, and multiplied in tiles that stay in registers.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;
#elif defined(__AVX__)
constexpr int VECTOR_BYTES = 32;
#else
constexpr int VECTOR_BYTES = 16;
#endif

#define INLINE inline __attribute__((always_inline))

namespace {

constexpr int SIZE = BLOCK_SIZE;
// Above the diagonal.
constexpr int ENTRIES = SIZE * (SIZE - 1) / 2;
constexpr int PLANE_LANES = VECTOR_BYTES / static_cast<int>(sizeof(float));

constexpr int power_of_two_from(int number) { return number <= 1 ? 1 : 2 * power_of_two_from((number + 1) / 2); }

// How matrices of T are stored and multiplied.
template <typename T>
struct Layout {
    static constexpr int LANES = std::min(VECTOR_BYTES / static_cast<int>(sizeof(T)), power_of_two_from(SIZE));
    static constexpr int VECTORS = (SIZE + LANES - 1) / LANES;
    static constexpr int STEP = VECTORS * LANES;
    typedef T Vector __attribute__((vector_size(LANES * sizeof(T))));
    // Tiles of at most 16 sums leave registers for their factors.
    static constexpr int TILE_COLUMNS = std::min(VECTORS, 4);
    static constexpr int TILE_ROWS = std::min(SIZE, TILE_COLUMNS <= 2 ? 8 : 4);
};

template <typename Vector, typename T>
INLINE Vector load(const T* source) {
    Vector vector;
    std::memcpy(&vector, source, sizeof(Vector));
    return vector;
}

template <typename Vector, typename T>
INLINE void store(T* target, Vector vector) {
    std::memcpy(target, &vector, sizeof(Vector));
}

// The numbers at these places of two vectors, one after the other. GCC has __builtin_shufflevector from 12 on only, and
// clang has no __builtin_shuffle.
template <int... PLACES, typename Vector>
INLINE Vector shuffle(Vector first, Vector second) {
#ifdef __clang__
    return __builtin_shufflevector(first, second, PLACES...);
#else
    using Integer = std::conditional_t<sizeof(Vector) / sizeof...(PLACES) == 8, int64_t, int32_t>;
    typedef Integer Places __attribute__((vector_size(sizeof(Vector))));
    return __builtin_shuffle(first, second, Places{PLACES...});
#endif
}

// 8×8 numbers, in registers, by swapping halves, quarters and pairs.
template <typename T>
INLINE void transpose_square(T* target, int target_step, const T* source, int step, T sign = 1) {
    typedef T Eight __attribute__((vector_size(8 * sizeof(T))));
    Eight a[8], b[8];
    for (int k = 0; k < 8; ++k) a[k] = load<Eight>(source + k * step);
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
    for (int k = 0; k < 8; ++k) store(target + k * target_step, sign * b[k]);
}

template <typename T>
struct alignas(VECTOR_BYTES) Matrix {
    static constexpr int STEP = Layout<T>::STEP;
    T numbers[SIZE * STEP];

    T* row(int index) { return numbers + index * STEP; }
    const T* row(int index) const { return numbers + index * STEP; }

    template <typename Source>
    INLINE void read(const Source* source) {
        for (int i = 0; i < SIZE; ++i) {
            for (int j = 0; j < SIZE; ++j) row(i)[j] = static_cast<T>(source[i * SIZE + j]);
            for (int j = SIZE; j < STEP; ++j) row(i)[j] = 0;
        }
    }

    template <typename Target>
    INLINE void write(Target* target) const {
        for (int i = 0; i < SIZE; ++i)
            for (int j = 0; j < SIZE; ++j) target[i * SIZE + j] = static_cast<Target>(row(i)[j]);
    }

    INLINE void set_transposed(const Matrix& other) {
        transpose(other.numbers, STEP);
        for (int i = 0; i < SIZE; ++i)
            for (int j = SIZE; j < STEP; ++j) row(i)[j] = 0;
    }

    INLINE void read_transposed(const T* source) {
        transpose(source, SIZE);
        for (int i = 0; i < SIZE; ++i)
            for (int j = SIZE; j < STEP; ++j) row(i)[j] = 0;
    }

   private:
    INLINE void transpose(const T* source, int step) {
        if constexpr (SIZE % 8 == 0) {
            for (int i = 0; i < SIZE; i += 8)
                for (int j = 0; j < SIZE; j += 8) transpose_square(row(j) + i, STEP, source + i * step + j, step);
        } else {
            for (int i = 0; i < SIZE; ++i)
                for (int j = 0; j < SIZE; ++j) row(j)[i] = source[i * step + j];
        }
    }
};

// ROWS × COLUMNS vectors of left · right, or of leftᵀ · right, or of what is there plus that.
template <typename T, bool TRANSPOSED, bool ADD, int ROWS, int COLUMNS>
INLINE void tile(T* out, const T* left, const T* right) {
    using L = Layout<T>;
    using Vector = typename L::Vector;
    Vector sums[ROWS][COLUMNS];
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < COLUMNS; ++c)
            sums[r][c] = ADD ? load<Vector>(out + r * L::STEP + c * L::LANES) : Vector{};
#pragma GCC unroll 4
    for (int k = 0; k < SIZE; ++k) {
        Vector factors[COLUMNS];
        for (int c = 0; c < COLUMNS; ++c) factors[c] = load<Vector>(right + k * L::STEP + c * L::LANES);
        for (int r = 0; r < ROWS; ++r)
            for (int c = 0; c < COLUMNS; ++c)
                sums[r][c] += (TRANSPOSED ? left[k * L::STEP + r] : left[r * L::STEP + k]) * factors[c];
    }
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < COLUMNS; ++c) store(out + r * L::STEP + c * L::LANES, sums[r][c]);
}

template <typename T, bool TRANSPOSED, bool ADD, int COLUMN = 0>
INLINE void multiply_columns(T* out, const T* left, const T* right) {
    using L = Layout<T>;
    if constexpr (COLUMN < L::VECTORS) {
        constexpr int COLUMNS = std::min(L::TILE_COLUMNS, L::VECTORS - COLUMN), REST = SIZE % L::TILE_ROWS;
        constexpr int OFFSET = COLUMN * L::LANES;
        const int down = TRANSPOSED ? 1 : L::STEP;
        for (int row = 0; row + L::TILE_ROWS <= SIZE; row += L::TILE_ROWS)
            tile<T, TRANSPOSED, ADD, L::TILE_ROWS, COLUMNS>(
                out + row * L::STEP + OFFSET, left + row * down, right + OFFSET);
        if constexpr (REST > 0)
            tile<T, TRANSPOSED, ADD, REST, COLUMNS>(
                out + (SIZE - REST) * L::STEP + OFFSET, left + (SIZE - REST) * down, right + OFFSET);
        multiply_columns<T, TRANSPOSED, ADD, COLUMN + COLUMNS>(out, left, right);
    }
}

template <bool TRANSPOSED = false, bool ADD = false, typename T>
void multiply(Matrix<T>& out, const Matrix<T>& left, const Matrix<T>& right) {
    multiply_columns<T, TRANSPOSED, ADD>(out.numbers, left.numbers, right.numbers);
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
                tile<T, false, ADD, ROWS, COLUMNS>(
                    out.row(row) + column, left.row(row), right.numbers + column);
        // The squares on the diagonal are there as a whole.
        for (int row = 0; row < SIZE; row += 8)
            for (int column = row + 8; column < SIZE; column += 8)
                transpose_square(out.row(row) + column, L::STEP, out.row(column) + row, L::STEP, T(SIGN));
    }
}

// Whether every thread got its memory: an exception that leaves a parallel region ends the process.
struct Memory {
    std::atomic<bool> enough{true};

    template <typename Allocate>
    void get(Allocate allocate) {
        try {
            allocate();
        } catch (const std::bad_alloc&) {
            enough = false;
        }
    }
};

// A matrix that is needed next, where it is too large for the hardware to have seen it coming.
INLINE void prefetch(const float* matrix) {
    constexpr int LINE = 64 / sizeof(float);
    if constexpr (SIZE >= 32)
        for (int i = 0; i < SIZE * SIZE; i += LINE) __builtin_prefetch(matrix + i);
}

struct Scratch {
    Matrix<double> exponent, second, third, sixth, combinations[5];
};

// exp of scratch.exponent by the polynomial of lie_algebra.py; in scratch.combinations[1].
void exponential(Scratch& scratch, const double* polynomial) {
    multiply_half<1>(scratch.second, scratch.exponent, scratch.exponent);
    multiply_half<-1>(scratch.third, scratch.second, scratch.exponent);
    multiply_half<1>(scratch.sixth, scratch.third, scratch.third);
    for (int i = 0; i < SIZE * Matrix<double>::STEP; ++i)
        for (int c = 0; c < 5; ++c) {
            const double* coefficients = polynomial + 5 * c;
            scratch.combinations[c].numbers[i] =
                coefficients[1] * scratch.exponent.numbers[i] + coefficients[2] * scratch.second.numbers[i] +
                coefficients[3] * scratch.third.numbers[i] + coefficients[4] * scratch.sixth.numbers[i];
        }
    for (int c = 0; c < 5; ++c)
        for (int i = 0; i < SIZE; ++i) scratch.combinations[c].row(i)[i] += polynomial[5 * c];
    auto& [b1, b2, b3, b4, b5] = scratch.combinations;
    multiply<false, true>(b4, b1, b5);
    for (int i = 0; i < SIZE * Matrix<double>::STEP; ++i) b3.numbers[i] += b4.numbers[i];
    multiply<false, true>(b2, b3, b4);
}

// sum += square · turn · squareᵀ for a skew-symmetric turn, given squareᵀ.
INLINE void add_conjugated(Matrix<float>& sum, const Matrix<float>& turn, const Matrix<float>& transposed,
                           Matrix<float>& spare) {
    multiply<true>(spare, transposed, turn);
    multiply_half<-1, true>(sum, spare, transposed);
}

// M − Mᵀ of what is there.
INLINE void skew(Matrix<float>& matrix, Matrix<float>& spare) {
    spare.set_transposed(matrix);
    for (int i = 0; i < SIZE * Matrix<float>::STEP; ++i) matrix.numbers[i] -= spare.numbers[i];
}

// Steps over samples, heads and tokens.
struct Steps {
    int64_t sample, head, token;
    int64_t at(int64_t b, int64_t h, int64_t n) const { return b * sample + h * head + n * token; }
};

// Query and key, or their gradients.
struct Pair {
    float* states[2];
    Steps steps[2];
    float* at(int which, int64_t b, int64_t h, int64_t n) const { return states[which] + steps[which].at(b, h, n); }
};

struct Shape {
    int64_t batch, heads, tokens, head_dim, blocks;
    // 1 where all samples share a rotation.
    int64_t rotation_batch;

    // Samples that share a rotation, and how many rotations there are.
    int64_t samples() const { return rotation_batch > 1 ? 1 : batch; }
    int64_t rotations() const { return rotation_batch * tokens * heads; }
};

// The token and head of one of the shape's rotations, and the first sample it is for.
struct Place {
    int64_t first, head, token;
    Place(int64_t rotation, const Shape& shape)
        : first(rotation / shape.heads / shape.tokens),
          head(rotation % shape.heads),
          token(rotation / shape.heads % shape.tokens) {}
};

// ROWS states times one right factor.
template <int ROWS, int COLUMNS>
INLINE void states_tile(float* const* out, const float* const* states, const float* right, int offset) {
    using L = Layout<float>;
    using Vector = typename L::Vector;
    Vector sums[ROWS][COLUMNS];
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < COLUMNS; ++c) sums[r][c] = Vector{};
#pragma GCC unroll 4
    for (int k = 0; k < SIZE; ++k) {
        Vector factors[COLUMNS];
        for (int c = 0; c < COLUMNS; ++c) factors[c] = load<Vector>(right + k * L::STEP + offset + c * L::LANES);
        for (int r = 0; r < ROWS; ++r)
            for (int c = 0; c < COLUMNS; ++c) sums[r][c] += states[r][k] * factors[c];
    }
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < COLUMNS; ++c) {
            const int first = offset + c * L::LANES;
            std::memcpy(out[r] + first, &sums[r][c], std::min(L::LANES, SIZE - first) * sizeof(float));
        }
}

template <int ROWS, int COLUMN = 0>
INLINE void multiply_states(float* const* out, const float* const* states, const float* right) {
    using L = Layout<float>;
    if constexpr (COLUMN < L::VECTORS) {
        constexpr int COLUMNS = std::min(L::TILE_COLUMNS, L::VECTORS - COLUMN);
        states_tile<ROWS, COLUMNS>(out, states, right, COLUMN * L::LANES);
        multiply_states<ROWS, COLUMN + COLUMNS>(out, states, right);
    }
}

// An even number of states, as rows, times `right`.
INLINE void multiply_all_states(const std::vector<float*>& out, const std::vector<const float*>& states,
                                const Matrix<float>& right) {
    constexpr size_t ROWS = Layout<float>::TILE_COLUMNS <= 2 ? 8 : 4;
    size_t row = 0;
    for (; row + ROWS <= states.size(); row += ROWS) multiply_states<ROWS>(&out[row], &states[row], right.numbers);
    for (; row < states.size(); row += 2) multiply_states<2>(&out[row], &states[row], right.numbers);
}

// Rows of Σ g rᵀ.
template <int ROWS, int COLUMNS>
INLINE void outer_tile(float* out, const std::vector<const float*>& gradients, const std::vector<const float*>& states,
                       int row, int offset) {
    using L = Layout<float>;
    using Vector = typename L::Vector;
    Vector sums[ROWS][COLUMNS];
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < COLUMNS; ++c) sums[r][c] = Vector{};
    for (size_t sample = 0; sample < states.size(); ++sample) {
        Vector factors[COLUMNS];
        for (int c = 0; c < COLUMNS; ++c) {
            const int first = offset + c * L::LANES;
            factors[c] = Vector{};
            std::memcpy(&factors[c], states[sample] + first, std::min(L::LANES, SIZE - first) * sizeof(float));
        }
        for (int r = 0; r < ROWS; ++r)
            for (int c = 0; c < COLUMNS; ++c) sums[r][c] += gradients[sample][row + r] * factors[c];
    }
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < COLUMNS; ++c) store(out + (row + r) * L::STEP + offset + c * L::LANES, sums[r][c]);
}

template <int COLUMN = 0>
INLINE void outer_columns(float* out, const std::vector<const float*>& gradients,
                          const std::vector<const float*>& states) {
    using L = Layout<float>;
    if constexpr (COLUMN < L::VECTORS) {
        constexpr int COLUMNS = std::min(L::TILE_COLUMNS, L::VECTORS - COLUMN), REST = SIZE % L::TILE_ROWS;
        for (int row = 0; row + L::TILE_ROWS <= SIZE; row += L::TILE_ROWS)
            outer_tile<L::TILE_ROWS, COLUMNS>(out, gradients, states, row, COLUMN * L::LANES);
        if constexpr (REST > 0) outer_tile<REST, COLUMNS>(out, gradients, states, SIZE - REST, COLUMN * L::LANES);
        outer_columns<COLUMN + COLUMNS>(out, gradients, states);
    }
}

typedef float Lanes __attribute__((vector_size(VECTOR_BYTES)));

// Each pair (x₀, x₁) replaced by (x_EVEN, x_ODD).
template <int EVEN, int ODD, int... LANES>
INLINE Lanes pairwise(Lanes vector, std::integer_sequence<int, LANES...>) {
    return shuffle<(LANES % 2 ? LANES - 1 + ODD : LANES + EVEN)...>(vector, vector);
}

template <int EVEN, int ODD>
INLINE Lanes pairwise(Lanes vector) {
    return pairwise<EVEN, ODD>(vector, std::make_integer_sequence<int, PLANE_LANES>{});
}

}  // namespace

extern "C" {

// All but the first return whether there was enough memory for what they need besides their arguments.
int hf_liere_block_size() { return SIZE; }

// Fresh memory costs more to get, page by page, than to fill.
int hf_liere_prefer_huge_pages(void* memory, int64_t bytes, int) {
#ifdef MADV_HUGEPAGE
    constexpr uintptr_t HUGE_PAGE = 1 << 21;
    const uintptr_t start = (reinterpret_cast<uintptr_t>(memory) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / HUGE_PAGE * HUGE_PAGE;
    if (start < end) madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE);
#endif
    return true;
}

// cpu_kernels.block_rotations: a ray of a group at a time.
int hf_liere_rotations(const double* positions, const double* generators, int64_t axes, int64_t groups, int64_t blocks,
                        int64_t tokens, const int64_t* rays, int64_t ray_count, int64_t longest,
                        const int64_t* squarings, const int64_t* slots, float* kept, int64_t kept_count,
                        int64_t kept_squares, const double* polynomial, float* const* out, int threads) {
    const int64_t block_numbers = SIZE * SIZE, group_numbers = blocks * block_numbers;
    Memory memory;
    std::vector<char> reached;
    memory.get([&] { reached.resize(tokens); });
    if (!memory.enough) return false;
    for (int64_t i = 0; i < ray_count * longest; ++i)
        if (rays[i] >= 0) reached[rays[i]] = 1;
#pragma omp parallel num_threads(threads)
    {
        std::vector<Scratch> own;
        memory.get([&] { own.resize(1); });
#pragma omp for schedule(dynamic, 1)
        for (int64_t work = 0; work < groups * (ray_count + 1); ++work) {
            if (!memory.enough) continue;
            Scratch& scratch = own[0];
            const int64_t group = work / (ray_count + 1), ray = work % (ray_count + 1);
            if (ray == ray_count) {
                for (int64_t token = 0; token < tokens; ++token)
                    if (!reached[token])
                        for (int64_t i = 0; i < group_numbers; ++i)
                            out[group][token * group_numbers + i] = i % block_numbers % (SIZE + 1) == 0;
                continue;
            }
            const int64_t* multiples = rays + ray * longest;
            double scale = 1;
            for (int64_t s = 0; s < squarings[ray]; ++s) scale /= 2;
            for (int64_t block = 0; block < blocks; ++block) {
                auto& exponent = scratch.exponent;
                for (int64_t axis = 0; axis < axes; ++axis) {
                    const double coordinate = positions[multiples[0] * axes + axis] * scale;
                    const double* generator =
                        generators + ((axis * groups + group) * blocks + block) * block_numbers;
                    for (int i = 0; i < SIZE; ++i)
                        for (int j = 0; j < SIZE; ++j)
                            exponent.row(i)[j] =
                                (axis ? exponent.row(i)[j] : 0.0) + coordinate * generator[i * SIZE + j];
                }
                exponential(scratch, polynomial);
                Matrix<double>*square = &scratch.combinations[1], *spare = &scratch.combinations[0];
                for (int64_t s = 0; s < squarings[ray]; ++s) {
                    if (kept && s % kept_squares == 0)
                        square->write(kept + (group * kept_count + slots[ray] + s / kept_squares) * group_numbers +
                                      block * block_numbers);
                    multiply(*spare, *square, *square);
                    std::swap(square, spare);
                }
                const Matrix<double>& first = *square;
                Matrix<double>*rotation = spare, *next = &scratch.combinations[2];
                first.write(out[group] + multiples[0] * group_numbers + block * block_numbers);
                for (int64_t k = 1; k < longest && multiples[k] >= 0; ++k) {
                    multiply(*next, k == 1 ? first : *rotation, first);
                    std::swap(rotation, next);
                    rotation->write(out[group] + multiples[k] * group_numbers + block * block_numbers);
                }
            }
        }
    }
    return memory.enough;
}

// cpu_kernels.block_turns: a ray of a group at a time.
int hf_liere_turns(int64_t groups, int64_t blocks, const int64_t* rays, int64_t ray_count, int64_t longest,
                    const int64_t* squarings, const int64_t* slots, const float* kept, int64_t kept_count,
                    int64_t kept_squares, const float* const* rotations, const float* const* gradients, float* entries,
                    int threads) {
    const int64_t block_numbers = SIZE * SIZE, group_numbers = blocks * block_numbers;
    Memory memory;
#pragma omp parallel num_threads(threads)
    {
        std::vector<Matrix<float>> scratch;
        memory.get([&] { scratch.resize(9); });
#pragma omp for schedule(dynamic, 1)
        for (int64_t work = 0; work < groups * ray_count; ++work) {
            if (!memory.enough) continue;
            Matrix<float>&rotation = scratch[0], &gradient = scratch[1], &turn = scratch[2], &total = scratch[3];
            Matrix<float>&first = scratch[4], &tail = scratch[5], &spare = scratch[6];
            const int64_t group = work / ray_count, ray = work % ray_count;
            const int64_t* multiples = rays + ray * longest;
            int64_t length = 0;
            while (length < longest && multiples[length] >= 0) ++length;
            for (int64_t block = 0; block < blocks; ++block) {
                // lie_algebra._turn_of_first, for one ray.
                first.read_transposed(rotations[group] + multiples[0] * group_numbers + block * block_numbers);
                for (int64_t k = length - 1; k >= 0; --k) {
                    const int64_t offset = multiples[k] * group_numbers + block * block_numbers;
                    rotation.read(rotations[group] + offset);
                    gradient.read(gradients[group] + offset);
                    multiply<true>(turn, rotation, gradient);
                    skew(turn, spare);
                    if (k == length - 1) {
                        total = tail = turn;
                        continue;
                    }
                    for (int i = 0; i < SIZE * Matrix<float>::STEP; ++i) tail.numbers[i] += turn.numbers[i];
                    turn = tail;
                    add_conjugated(turn, total, first, spare);
                    total = turn;
                }
                // lie_algebra._conjugated, for one ray.
                Matrix<float>*square = &scratch[7], *next = &scratch[8];
                for (int64_t s = 0; s < squarings[ray]; ++s) {
                    if (s % kept_squares == 0)
                        square->read_transposed(
                            kept + (group * kept_count + slots[ray] + s / kept_squares) * group_numbers +
                            block * block_numbers);
                    add_conjugated(total, total, *square, spare);
                    if (s + 1 < squarings[ray] && (s + 1) % kept_squares) {
                        multiply(*next, *square, *square);
                        std::swap(square, next);
                    }
                }
                float* target = entries + ((group * ray_count + ray) * blocks + block) * ENTRIES;
                for (int i = 0; i < SIZE; ++i)
                    for (int j = i + 1; j < SIZE; ++j) *target++ = total.row(i)[j];
            }
        }
    }
    return memory.enough;
}

// cpu_kernels.moments_gradient, as exponential_gradient.GradientMoments._gradient: a block of a group at a time.
int hf_liere_moments_gradient(const float* generators, int64_t axes, int64_t groups, int64_t blocks,
                               const float* moments, int64_t monomials, const double* coefficients, int64_t degrees,
                               const int64_t* level_sizes, const int64_t* raised, float* out, int threads) {
    const int64_t numbers = SIZE * SIZE, widest = *std::max_element(level_sizes, level_sizes + degrees);
    Memory memory;
#pragma omp parallel num_threads(threads)
    {
        std::vector<Matrix<float>> factors, level, higher, spare;
        memory.get([&] {
            factors.resize(axes);
            level.resize(widest);
            higher.resize(widest);
            spare.resize(1);
        });
#pragma omp for schedule(dynamic, 1)
        for (int64_t work = 0; work < groups * blocks; ++work) {
            if (!memory.enough) continue;
            const int64_t group = work / blocks, block = work % blocks;
            for (int64_t axis = 0; axis < axes; ++axis)
                factors[axis].read(generators + (axis * groups * blocks + work) * numbers);
            int64_t monomial = monomials;
            const int64_t* places = raised;
            for (int64_t d = 0; d + 1 < degrees; ++d) places += axes * level_sizes[d];
            for (int64_t degree = degrees - 1; degree >= 0; --degree) {
                const int64_t size = level_sizes[degree];
                monomial -= size;
                if (degree + 1 < degrees) places -= axes * size;
                for (int64_t place = 0; place < size; ++place) {
                    Matrix<float>& sum = level[place];
                    if (degree + 1 == degrees)
                        std::fill_n(sum.numbers, SIZE * Matrix<float>::STEP, 0.0f);
                    else
                        for (int64_t axis = 0; axis < axes; ++axis) {
                            const Matrix<float>& next = higher[places[axis * size + place]];
                            if (axis == 0)
                                multiply(sum, factors[axis], next);
                            else
                                multiply<false, true>(sum, factors[axis], next);
                        }
                    const float* moment = moments + ((group * monomials + monomial + place) * blocks + block) * ENTRIES;
                    const float coefficient = static_cast<float>(coefficients[degree]);
                    for (int i = 0; i < SIZE; ++i)
                        for (int j = i + 1; j < SIZE; ++j) sum.row(i)[j] += coefficient * *moment++;
                    skew(sum, spare[0]);
                }
                std::swap(level, higher);
            }
            for (int64_t axis = 0; axis < axes; ++axis)
                higher[axis].write(out + (axis * groups * blocks + work) * numbers);
        }
    }
    return memory.enough;
}

// cpu_kernels.apply_rotation for blocks: those of a token and head at a time, for all samples that share them.
int hf_liere_multiply(const Shape* shape, const Pair* states, const Pair* out, const float* rotation,
                       const Steps* rotation_steps, int inverse, int threads) {
    const int64_t samples = shape->samples();
    const int64_t width = shape->blocks * SIZE;
    Memory memory;
#pragma omp parallel num_threads(threads)
    {
        std::vector<Matrix<float>> own;
        std::vector<const float*> from;
        std::vector<float*> to;
        memory.get([&] {
            own.resize(1);
            from.resize(2 * samples);
            to.resize(2 * samples);
        });
#pragma omp for schedule(static)
        for (int64_t work = 0; work < shape->rotations(); ++work) {
            if (!memory.enough) continue;
            Matrix<float>& right = own[0];
            const auto [first, head, token] = Place(work, *shape);
            for (int64_t sample = 0; sample < samples; ++sample)
                for (int which = 0; which < 2; ++which) {
                    from[2 * sample + which] = states->at(which, first + sample, head, token);
                    to[2 * sample + which] = out->at(which, first + sample, head, token);
                    std::copy(from[2 * sample + which] + width, from[2 * sample + which] + shape->head_dim,
                              to[2 * sample + which] + width);
                }
            const float* source = rotation + rotation_steps->at(first, head, token);
            for (int64_t block = 0; block < shape->blocks; ++block, source += SIZE * SIZE) {
                if (inverse)
                    right.read(source);
                else
                    right.read_transposed(source);
                prefetch(source + SIZE * SIZE);
                multiply_all_states(to, from, right);
                for (auto& each : from) each += SIZE;
                for (auto& each : to) each += SIZE;
            }
        }
    }
    return memory.enough;
}

// cpu_kernels.outer_products, likewise.
int hf_liere_outer_products(const Shape* shape, const Pair* gradients, const Pair* states, float* out,
                             const Steps* out_steps, const float* rotation, const Steps* rotation_steps, int threads) {
    const int64_t samples = shape->samples();
    // Few states are sooner turned back one by one: (Σ g rᵀ) R = Σ g (Rᵀ r)ᵀ.
    const bool by_states = rotation && 2 * samples < SIZE;
    Memory memory;
#pragma omp parallel num_threads(threads)
    {
        std::vector<Matrix<float>> scratch;
        std::vector<const float*> left, right, turned_back;
        std::vector<float> numbers;
        std::vector<float*> rows;
        memory.get([&] {
            scratch.resize(3);
            left.resize(2 * samples);
            right.resize(2 * samples);
            if (by_states) numbers.resize(2 * samples * SIZE);
            for (size_t i = 0; i < numbers.size(); i += SIZE) {
                rows.push_back(&numbers[i]);
                turned_back.push_back(&numbers[i]);
            }
        });
#pragma omp for schedule(static)
        for (int64_t work = 0; work < shape->rotations(); ++work) {
            if (!memory.enough) continue;
            const auto [first, head, token] = Place(work, *shape);
            for (int64_t sample = 0; sample < samples; ++sample)
                for (int which = 0; which < 2; ++which) {
                    left[2 * sample + which] = gradients->at(which, first + sample, head, token);
                    right[2 * sample + which] = states->at(which, first + sample, head, token);
                }
            float* target = out + out_steps->at(first, head, token);
            for (int64_t block = 0; block < shape->blocks; ++block, target += SIZE * SIZE) {
                if (rotation) {
                    const float* source = rotation + rotation_steps->at(first, head, token) + block * SIZE * SIZE;
                    scratch[1].read(source);
                    prefetch(source + SIZE * SIZE);
                }
                if (by_states) multiply_all_states(rows, right, scratch[1]);
                outer_columns(scratch[0].numbers, left, by_states ? turned_back : right);
                if (rotation && !by_states) multiply(scratch[2], scratch[0], scratch[1]);
                scratch[rotation && !by_states ? 2 : 0].write(target);
                for (auto& each : left) each += SIZE;
                for (auto& each : right) each += SIZE;
            }
        }
    }
    return memory.enough;
}

// cpu_kernels.apply_rotation for planes: a token of a sample at a time.
int hf_liere_turn_planes(const Shape* shape, const Pair* states, const Pair* out, const float* planes,
                          const Steps* plane_steps, int inverse, int threads) {
    const int64_t width = 2 * shape->blocks;
    Lanes signs;
    for (int i = 0; i < PLANE_LANES; ++i) signs[i] = (i % 2 == 0) == (inverse == 0) ? -1.0f : 1.0f;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t work = 0; work < shape->batch * shape->tokens; ++work) {
        const int64_t sample = work / shape->tokens, token = work % shape->tokens;
        for (int which = 0; which < 2; ++which)
            for (int64_t head = 0; head < shape->heads; ++head) {
                const float* from = states->at(which, sample, head, token);
                float* to = out->at(which, sample, head, token);
                const float* turn = planes + plane_steps->at(shape->rotation_batch > 1 ? sample : 0, head, token);
                int64_t i = 0;
                for (; i + PLANE_LANES <= width; i += PLANE_LANES) {
                    const Lanes numbers = load<Lanes>(from + i), angle = load<Lanes>(turn + i);
                    store(to + i, numbers * pairwise<0, 0>(angle) +
                                      pairwise<1, 0>(numbers) * (signs * pairwise<1, 1>(angle)));
                }
                for (; i < width; i += 2) {
                    const float cos = turn[i], sin = inverse ? -turn[i + 1] : turn[i + 1];
                    const float x = from[i], y = from[i + 1];
                    to[i] = x * cos - y * sin;
                    to[i + 1] = x * sin + y * cos;
                }
                std::copy(from + width, from + shape->head_dim, to + width);
            }
    }
    return true;
}

// cpu_kernels.angle_gradients: a token and head at a time.
int hf_liere_angle_gradients(const Shape* shape, const Pair* gradients, const Pair* states, float* out,
                              const Steps* out_steps, int threads) {
    const int64_t samples = shape->samples(), width = 2 * shape->blocks;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t work = 0; work < shape->rotations(); ++work) {
        const auto [first, head, token] = Place(work, *shape);
        float* target = out + out_steps->at(first, head, token);
        int64_t i = 0;
        for (; i + PLANE_LANES <= width; i += PLANE_LANES) {
            Lanes products = {};
            for (int64_t sample = first; sample < first + samples; ++sample)
                for (int which = 0; which < 2; ++which)
                    products += pairwise<1, 0>(load<Lanes>(gradients->at(which, sample, head, token) + i)) *
                                load<Lanes>(states->at(which, sample, head, token) + i);
            for (int plane = 0; plane < PLANE_LANES / 2; ++plane)
                target[i / 2 + plane] = products[2 * plane] - products[2 * plane + 1];
        }
        for (; i < width; i += 2) {
            float slope = 0;
            for (int64_t sample = first; sample < first + samples; ++sample)
                for (int which = 0; which < 2; ++which) {
                    const float* gradient = gradients->at(which, sample, head, token) + i;
                    const float* state = states->at(which, sample, head, token) + i;
                    slope += gradient[1] * state[0] - gradient[0] * state[1];
                }
            target[i / 2] = slope;
        }
    }
    return true;
}

}  // extern "C"

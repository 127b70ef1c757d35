// The kernels of cpu.py. pyproject.toml declares the libraries that are built from them for several kinds of CPU. The
// headers:
//
//   matrix.h       vectors, b × b matrices and their products in registers, threads
//   exponential.h  rotations from generators, and the gradients of generators
//   rotation.h     query and key rotated by blocks, and the gradients of blocks
//   planes.h       query and key rotated by planes, and the gradients of angles
//   vectors.h      query and key rotated by small blocks, in vectors of channels
//   commuting.h    the gradients of commuting generators
//   quaternions.h  rotations of blocks of 3 and 4 channels in closed form
//
// Memory, C-contiguous unless strides are given; G groups (layers or heads that share positions), K blocks per group:
//
//   positions      (tokens, axes)                   float64 or float32, the type that exponentials are computed in
//   generators     (axes, G, K, b, b)               the same, and float32 in the backward pass
//   rotations      G × (tokens, K, b, b)            float32, one allocation per group
//   saved squares  (G, saved, K, b, b)              float32, those of a ray from its offset on
//   quaternions    (G, axes, 1 or 2, 3, K)          float64, of generators; gradients (G, tokens, 1 or 2, 3, K) float32
//   tangents       (G, rays, K, b(b−1)/2)           float32, the entries above the diagonal, row by row
//   moments        (G, monomials, K, b(b−1)/2)      float32, likewise
//   states         (batch, heads, tokens, head_dim) float32 or bfloat16, query or key, strided but for their channels
//   rotation       (1 or batch, 1 or heads, tokens, blocks, b, b) or (…, planes, 2), strided over the first three
//
// Blocks are padded with zeros to one of the compiled sizes: the rotation of [[A, 0], [0, 0]] is [[exp A, 0], [0, 1]],
// so padding does not change any result. Results do not depend on the number of threads: a single iteration writes each
// one and adds in a fixed order.
//
// Sizes, strides and offsets in tensors are int64_t, so tensors may have more than 2³¹ elements. An int only counts inside
// a block (at most 128 × 128 entries), a vector of channels, or threads.

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "commuting.h"
#include "exponential.h"
#include "planes.h"
#include "quaternions.h"
#include "rotation.h"
#include "vectors.h"

namespace {

// Calls body(state) with a value of the states' type.
template <typename Body>
bool with_state_type(const Shape& shape, Body body) {
    return shape.is_bfloat16 ? body(BFloat16{}) : body(float{});
}

// Calls body(rows) with the kind of rows that the states need.
template <typename Body>
bool with_rows(const Shape& shape, Body body) {
    return with_compiled_size(shape.size, [&](auto size) {
        if (shape.is_bfloat16) return body(static_cast<CopiedRows<size, BFloat16>*>(nullptr));
        if (shape.size < size) return body(static_cast<CopiedRows<size, float>*>(nullptr));
        return body(static_cast<Rows<size>*>(nullptr));
    });
}

// Calls small(size, state) where blocks of MOST channels at most fill a vector of channels or equal parts of it, otherwise
// other(rows).
template <int MOST, typename Small, typename Other>
bool with_small_blocks(const Shape& shape, Small small, Other other) {
    return with_compiled_size(shape.size, [&](auto size) {
        if constexpr (size <= std::min(MOST, CHANNELS))
            if (shape.size == size) return with_state_type(shape, [&](auto state) { return small(size, state); });
        return with_rows(shape, other);
    });
}

}  // namespace

extern "C" {

// Increase this, here and in cpu_library.py, whenever arguments or block sizes change.
int hf_liere_interface() { return 8; }

// Page faults cost more than the writes to fresh memory.
void hf_liere_prefer_huge_pages(void* memory, int64_t bytes) {
#ifdef MADV_HUGEPAGE
    constexpr uintptr_t HUGE_PAGE = 1 << 21;
    const uintptr_t start = (reinterpret_cast<uintptr_t>(memory) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / HUGE_PAGE * HUGE_PAGE;
    if (start < end) madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE);
#endif
}

int hf_liere_block_rotations(const Sizes* sizes, const Rays* rays, int is_double, const void* positions,
                             const void* generators, const double* polynomial, float* const* rotations, int threads) {
    return with_compiled_size(sizes->size, [=](auto size) {
        const auto compute = [=](auto zero) {
            using T = decltype(zero);
            return block_rotations<size, T>(*sizes, *rays, static_cast<const T*>(positions),
                                            static_cast<const T*>(generators), polynomial, rotations, threads);
        };
        return is_double ? compute(0.0) : compute(0.0f);
    });
}

int hf_liere_block_tangents(const Sizes* sizes, const Rays* rays, const float* const* rotations,
                            const float* const* gradients, float* tangents, int threads) {
    return with_compiled_size(sizes->size, [=](auto size) {
        return block_tangents<size>(*sizes, *rays, rotations, gradients, tangents, threads);
    });
}

int hf_liere_moments_gradient(const Sizes* sizes, const Monomials* monomials, const float* generators,
                              const float* moments, float* out, int threads) {
    return with_compiled_size(sizes->size, [=](auto size) {
        return moments_gradient<size>(*sizes, *monomials, generators, moments, out, threads);
    });
}

int hf_liere_quaternion_rotations(const Sizes* sizes, int64_t tokens, const double* positions,
                                  const double* generators, float* rotations, int threads) {
    const auto compute = sizes->size == 3 ? quaternion_rotations<3> : quaternion_rotations<4>;
    compute(*sizes, tokens, positions, generators, rotations, threads);
    return true;
}

int hf_liere_quaternion_gradients(const Sizes* sizes, int64_t tokens, const double* positions,
                                  const double* generators, const float* gradients, float* out, int threads) {
    const auto compute = sizes->size == 3 ? quaternion_gradients<3> : quaternion_gradients<4>;
    compute(*sizes, tokens, positions, generators, gradients, out, threads);
    return true;
}

int hf_liere_rotate_blocks(const Shape* shape, const Pair* states, const Pair* out, const Shared* rotation,
                           int inverse, int threads) {
    const auto small = [=](auto size, auto state) {
        return rotate_small_blocks<size, decltype(state)>(*shape, *states, *out, *rotation, inverse, threads);
    };
    return with_small_blocks<8>(*shape, small, [=](auto* rows) {
        return rotate_blocks<std::remove_pointer_t<decltype(rows)>>(*shape, *states, *out, *rotation, inverse, threads);
    });
}

int hf_liere_outer_products(const Shape* shape, const Pair* gradients, const Pair* states, const Shared* out,
                            const Shared* rotation, int threads) {
    return with_rows(*shape, [=](auto* rows) {
        return outer_products<std::remove_pointer_t<decltype(rows)>>(*shape, *gradients, *states, *out, rotation, threads);
    });
}

int hf_liere_rotate_planes(const Shape* shape, const Pair* states, const Pair* out, const Shared* cos_sin, int inverse,
                           int threads) {
    return with_state_type(*shape, [=](auto state) {
        rotate_planes<decltype(state)>(*shape, *states, *out, *cos_sin, inverse, threads);
        return true;
    });
}

int hf_liere_angle_gradients(const Shape* shape, const Pair* gradients, const Pair* states, const Shared* out,
                             int threads) {
    return with_state_type(*shape, [=](auto state) {
        angle_gradients<decltype(state)>(*shape, *gradients, *states, *out, threads);
        return true;
    });
}

int hf_liere_commuting_backward(const Shape* shape, const Pair* gradients, const Pair* states, const Shared* out,
                                const Pair* back, const Shared* cos_sin, const Shared* phases, int64_t group,
                                const float* frequencies, float* sums, int threads) {
    const auto small = [=](auto size, auto state) {
        return commuting_backward_by_vectors<size, decltype(state)>(
            *shape, *gradients, *states, *out, *back, *cos_sin, *phases, group, frequencies, sums, threads);
    };
    return with_small_blocks<16>(*shape, small, [=](auto* rows) {
        return commuting_backward<std::remove_pointer_t<decltype(rows)>>(
            *shape, *gradients, *states, *out, *back, *cos_sin, *phases, group, frequencies, sums, threads);
    });
}

}  // extern "C"

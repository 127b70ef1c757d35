// The kernels of cpu.py, compiled for one block size b (BLOCK_SIZE) and for the machine that runs them: one translation
// unit, of which the headers hold a part each.
//
//   matrix.h       vectors, b × b matrices and their products in registers, threads
//   exponential.h  rotations from generators, and the gradients of generators
//   rotation.h     query and key rotated, and the gradients of rotations
//
// Memory, C-contiguous unless strides are given; G groups (layers or heads that share positions), K blocks per group:
//
//   positions      (tokens, axes)                   float64
//   generators     (axes, G, K, b, b)               float64, and float32 in the backward pass
//   rotations      G × (tokens, K, b, b)            float32, one allocation per group
//   saved squares  (G, saved, K, b, b)              float32, those of a ray from its offset on
//   tangents       (G, rays, K, b(b−1)/2)           float32, the entries above the diagonal, row by row
//   moments        (G, monomials, K, b(b−1)/2)      float32, likewise
//   states         (batch, heads, tokens, head_dim) float32, query or key, strided but for their channels
//   rotation       (1 or batch, 1 or heads, tokens, blocks, b, b) or (…, planes, 2), strided over the first three
//
// Inside, a matrix has its rows padded with zeros to whole vectors (Matrix). Results do not depend on the number of
// threads: each is written by one iteration, which adds in a fixed order.

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "exponential.h"
#include "rotation.h"

extern "C" {

int hf_liere_block_size() { return SIZE; }

// Page faults cost more than the writes to fresh memory.
void hf_liere_prefer_huge_pages(void* memory, int64_t bytes) {
#ifdef MADV_HUGEPAGE
    constexpr uintptr_t HUGE_PAGE = 1 << 21;
    const uintptr_t start = (reinterpret_cast<uintptr_t>(memory) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / HUGE_PAGE * HUGE_PAGE;
    if (start < end) madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE);
#endif
}

}  // extern "C"

// What one thread computes. Each variant (one instruction set) fills this table; handlers.cc picks one at load time.
#pragma once

#include <cstdint>

#if defined(__x86_64__) && __GNUC__ >= 11  // older compilers know no AMX
#define RECJAX_AMX
#endif

namespace recjax {

enum class Type { kFloat32, kBfloat16 };

// The strictly lower triangle of F x F products row by row, or with `itself` the diagonal too.
struct Interaction {
  int64_t vectors;  // F
  int64_t dim;      // D
  bool itself;
  Type type;  // of vectors, products and their cotangents; sums are float32

  int64_t products() const { return vectors * (itself ? vectors + 1 : vectors - 1) / 2; }
};

struct Bags {
  int64_t rows;  // U; an index outside 0..U-1 stands for nothing
  int64_t ids;   // H of a bag
  int64_t dim;   // D
};

static inline bool IsRow(int32_t id, int64_t rows) {
  return static_cast<uint64_t>(static_cast<int64_t>(id)) < static_cast<uint64_t>(rows);
}

// Terms of sums of rows, in the order in which they are added: sums[row] += weight * cotangents[bag].
struct Terms {
  int32_t* row;
  int32_t* bag;
  float* weight;  // null: all 1
};

struct Product;  // product.h
struct Products;

struct Kernels {
  // Floats of scratch that the next two need.
  int64_t (*interaction_scratch)(const Interaction&);
  // [samples, F, D] -> [samples, P].
  void (*interaction_forward)(const Interaction&, int64_t samples, const void* vectors, void* products,
                              float* scratch);
  // [samples, F, D] and [samples, P] -> [samples, F, D].
  void (*interaction_backward)(const Interaction&, int64_t samples, const void* vectors, const void* cotangents,
                               void* gradients, float* scratch);
  // [U, D], [bags, H] and perhaps weights [bags, H] -> [bags, D].
  void (*bags_forward)(const Bags&, int64_t bags, const float* rows, const int32_t* inverse, const float* weights,
                       float* pooled);
  // Adds terms begin..end to the gradients of rows, [U, D].
  void (*bags_add)(int64_t dim, const Terms&, int64_t begin, int64_t end, const float* cotangents, float* gradients);
};

extern const Kernels kPlain;
extern const Kernels kAvx2;
extern const Kernels kAvx512;
extern const Kernels kAvx512Bf16;

extern const Products kPlainProducts;
extern const Products kAvx2Products;
extern const Products kAvx512Products;
extern const Products kAvx512Bf16Products;
extern const Products kAmxProducts;

// What is in use; the second for this product.
const Kernels& Chosen();
const Products& ChosenProducts(const Product&);

}  // namespace recjax

// Products of matrices with what a dense layer needs around them. dense.cc calls them for XLA.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace recjax {

struct Matrix {
  const void* values;
  Type type;
  int64_t stride;      // values from one row of memory to the next
  bool turned;         // memory holds the transpose
  const void* mask;    // like values, or null: a value counts as 0 where the mask is not above 0
};

// C [rows, columns] = A [rows, terms] times B [terms, columns], plus the bias, perhaps without what is below 0.
//
// Factors are rounded to `type`, sums are float32 and have one order, whatever the tiles that a thread takes.
struct Product {
  int64_t rows, columns, terms;
  Type type;
  Matrix a;           // of `type`; has no mask if turned
  Matrix b;           // has no mask if turned, and then is float32
  void* c;
  Type c_type;
  const float* bias;  // [columns], or null
  bool relu;
};

// B, and A if it is turned, are packed ahead in parts, panels of rows or columns of blocks of terms. Then tiles of C are
// computed: rows in units of `height`, columns in units of `width`, those of a panel.
struct Products {
  int64_t height, width;
  int64_t (*blocks)(const Product&);
  // Floats that all of A takes, 0 if it is not packed ahead; all of B; the scratch of a `multiply` of so many tiles.
  int64_t (*packed_a_size)(const Product&);
  int64_t (*packed_b_size)(const Product&);
  int64_t (*scratch_size)(const Product&, int64_t tile_rows, int64_t panels);
  // Packs panels of one block. `sums`, if not null, gets the sums of their columns within it, [panels, width].
  void (*pack_a)(const Product&, int64_t block, int64_t tile_row, int64_t tile_rows, float* packed);
  void (*pack_b)(const Product&, int64_t block, int64_t panel, int64_t panels, float* packed, float* sums);
  void (*multiply)(const Product&, const float* packed_a, const float* packed_b, int64_t tile_row, int64_t tile_rows,
                   int64_t panel, int64_t panels, float* scratch);
};

}  // namespace recjax

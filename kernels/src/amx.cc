// Products in bfloat16 on Intel's matrix unit.
#if defined(__x86_64__)
#pragma GCC target("amx-tile,amx-bf16,avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#define VECTOR 16
#define PRODUCT_ROWS 32
#define PRODUCT_STEPS 256
#define PAIRS
#define TILES
#include "product.inc"

namespace recjax {

const Products kAmxProducts = kProducts;

}  // namespace recjax
#endif

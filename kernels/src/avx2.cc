#if defined(__x86_64__)
#pragma GCC target("avx2,fma")
#define VARIANT kAvx2
#define PRODUCTS kAvx2Products
#define VECTOR 8
#define TILE 6  // 6 x 2 sums, 2 columns and a factor in 16 registers
#define PRODUCT_ROWS 6
#define PRODUCT_STEPS 512
#include "variant.inc"
#endif

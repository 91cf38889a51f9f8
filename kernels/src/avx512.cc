#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#define VARIANT kAvx512
#define PRODUCTS kAvx512Products
#define VECTOR 16
#define TILE 9  // 9 x 2 sums in 32 registers; 27 vectors (26 tables and the dense features) are 3 tiles
#define PRODUCT_ROWS 14
#define PRODUCT_STEPS 512
#include "variant.inc"
#endif

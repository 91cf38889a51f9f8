#if defined(__x86_64__)
#pragma GCC target("avx2,fma")
#define VARIANT kAvx2
#define VARIANT_NAME "avx2"
#define VECTOR 8
#define TILE 6  // 6 x 2 sums, 2 columns and a factor in 16 registers
#include "variant.inc"
#endif

// For any processor. The compiler's own idea of a vector of 4 floats is SSE2 on x86-64 and NEON on ARM.
#define VARIANT kPlain
#define PRODUCTS kPlainProducts
#define VECTOR 4
#define TILE 6
#define PRODUCT_ROWS 6
#define PRODUCT_STEPS 512
#include "variant.inc"

// Products on Intel's matrix unit (AMX-BF16), whose tiles have 16 rows of 16 sums, or of 16 pairs of bfloat16.
//
// It rounds to nearest and takes magnitudes below 2^-126 for 0, whatever the thread's modes. A factor in float32 is
// the sum of three bfloat16, its parts: of 8 bits each they have its 24. Of the nine products of two factors' parts
// the three least are left out, in sum at most 2^-24 of the whole, as much as rounding it to float32 may take; the
// others are added up beginning with the least, 32 terms at once, so that sums are rounded less often than one term
// after the other. (Henry, Tang, Heinecke, "Leveraging the bfloat16 artificial intelligence datatype for
// higher-precision computations", ARITH 2019.) What of a factor lies below 2^-126 is lost with its part: one below
// 2^-102 may have fewer than 24 bits. A tile that is not finite is added up anew in float32: inf less inf is no part.
#include "kernels.h"

#if defined(RECJAX_AMX)
#pragma GCC target("amx-tile,amx-bf16,avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#include <immintrin.h>

#define VECTOR 16
#include "product.h"
#include "vectors.inc"

namespace recjax {
namespace {

constexpr int kHeight = 32, kWidth = 32;  // 2 x 2 tiles of sums
constexpr int64_t kUnit = 16;             // steps of a tile
constexpr int64_t kMost = 256;            // steps of a block: two terms each
constexpr int64_t kTogether = 1;          // no panel fits into the first cache

INLINE int Parts(const Product& p) { return p.type == Type::kFloat32 ? 3 : 1; }
INLINE int64_t Steps(const Product& p) { return RoundUp((p.terms + 1) / 2, kUnit); }
INLINE int64_t MostSteps(const Product&) { return kMost; }

}  // namespace
}  // namespace recjax

#include "panels.inc"

namespace recjax {
namespace {

// What tiles read together lies together, in the order in which they read it, for that is what processors fetch ahead:
// a panel has for every kUnit steps one part after the other, of A [kHeight, kUnit], of B [kUnit, kWidth].
constexpr int64_t kPart = kHeight * kUnit;
static_assert(kHeight == kWidth && kUnit == V);
INLINE int64_t PanelOfA(const Product& p) { return Parts(p) * kMost * kHeight; }

int64_t PackedASize(const Product& p) { return p.a.turned ? Blocks(p) * TileRows(p) * PanelOfA(p) : 0; }
INLINE int64_t PackedAAt(const Product& p, int64_t at, Block, int64_t tile_row) {
  return (at * TileRows(p) + tile_row) * PanelOfA(p);
}
int64_t PackedBSize(const Product& p) { return Parts(p) * Steps(p) * Panels(p) * kWidth; }
INLINE int64_t PackedBAt(const Product& p, Block block, int64_t panel) {
  return Parts(p) * (block.first * Panels(p) + panel * block.count) * kWidth;
}

// ---- packing ----

using Pairs = VectorOf<uint16_t, 2 * V>::type;

template <int kHalf, int... I>
INLINE Shorts Half(Pairs x, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(x, x, (kHalf * V + I)...);
}
template <int kHalf>
INLINE Shorts Half(Pairs x) {
  return Half<kHalf>(x, std::make_integer_sequence<int, V>());
}
template <int... I>
INLINE Pairs Woven(Pairs x, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(x, x, (I % 2 * V + I / 2)...);
}
INLINE Floats FloatsOf(Pairs x) { return LoadAny<Floats>(&x); }

// The parts of 2 V values, `low` and then `high`.
template <int kParts>
INLINE void Split(Floats low, Floats high, Pairs (&parts)[kParts]) {
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) {
    const __m512bh rounded = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    __builtin_memcpy(&parts[i], &rounded, sizeof rounded);
    if (i + 1 == kParts) break;
    low -= Widen(Half<0>(parts[i]));
    high -= Widen(Half<1>(parts[i]));
  }
}

// Up to n values from `column` of row `row`, if it is below `rows`; zeros elsewhere.
INLINE Floats Values(const Matrix& m, int64_t rows, int64_t row, int64_t column, int64_t n) {
  if (row >= rows || n <= 0) return Floats{};
  const int64_t at = row * m.stride + column;
  const Floats x = Load(static_cast<const float*>(m.values) + at, n);
  if (!m.mask) return x;
  return Load(static_cast<const float*>(m.mask) + at, n) > 0 ? x : Floats{};
}
INLINE Shorts ShortValues(const Matrix& m, int64_t rows, int64_t row, int64_t column, int64_t n) {
  if (row >= rows || n <= 0) return Shorts{};
  const int64_t at = row * m.stride + column;
  const auto load = [n](const uint16_t* from) {
    Shorts x{};
    if (n >= V) return LoadAny<Shorts>(from);
    for (int64_t i = 0; i < n; ++i) x[i] = from[i];
    return x;
  };
  const Shorts x = load(static_cast<const uint16_t*>(m.values) + at);
  return m.mask ? Above0(load(static_cast<const uint16_t*>(m.mask) + at), x) : x;
}

// The parts of 2 V terms along a row of memory, which end before `terms`.
template <typename T, int kParts>
INLINE void AlongRow(const Matrix& m, int64_t terms, int64_t rows, int64_t row, int64_t term, Pairs (&parts)[kParts]) {
  const int64_t n = terms - term;
  if constexpr (sizeof(T) == sizeof(float)) {
    Split(Values(m, rows, row, term, n), Values(m, rows, row, term + V, n - V), parts);
  } else {
    const Shorts halves[2] = {ShortValues(m, rows, row, term, n), ShortValues(m, rows, row, term + V, n - V)};
    parts[0] = LoadAny<Pairs>(halves);
  }
}

// The parts of a step of V neighbours in memory, each from two rows; `sums` gets the sums of both, in float32.
template <typename T, int kParts>
INLINE void AcrossRows(const Matrix& m, int64_t terms, int64_t step, int64_t column, int64_t n, Pairs (&parts)[kParts],
                       Floats* sums = nullptr) {
  constexpr auto kAll = std::make_integer_sequence<int, 2 * V>();
  if constexpr (sizeof(T) == sizeof(float)) {
    const Floats low = Values(m, terms, 2 * step, column, n), high = Values(m, terms, 2 * step + 1, column, n);
    if (sums) *sums += low, *sums += high;
    Split(low, high, parts);
  } else {
    const Shorts halves[2] = {ShortValues(m, terms, 2 * step, column, n),
                              ShortValues(m, terms, 2 * step + 1, column, n)};
    if (sums) *sums += Widen(halves[0]), *sums += Widen(halves[1]);
    parts[0] = LoadAny<Pairs>(halves);
  }
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) parts[i] = Woven(parts[i], kAll);
}

template <typename T, int kParts>
void PackRows(const Product& p, Block block, int64_t row, float* panel) {
  for (int64_t r = 0; r < kHeight; ++r) {
    for (int64_t k = 0; k < block.count; k += V) {
      Pairs parts[kParts];
      AlongRow<T>(p.a, p.terms, p.rows, row + r, 2 * (block.first + k), parts);
      float* to = panel + k * kParts * kHeight + r * kUnit;
      for (int i = 0; i < kParts; ++i) Store(to + i * kPart, FloatsOf(parts[i]));
    }
  }
}

// Panels of A where memory holds the transpose.
template <typename T, int kParts>
void PackTurnedRows(const Product& p, Block block, int64_t row, int64_t tile_rows, float* panels) {
  for (int64_t k = 0; k < block.count; k += V) {
    for (int64_t at = 0; at < tile_rows * kHeight; at += V) {
      Floats squares[kParts][V];
      for (int i = 0; i < V; ++i) {
        Pairs parts[kParts];
        AcrossRows<T>(p.a, p.terms, block.first + k + i, row + at, p.rows - row - at, parts);
        for (int part = 0; part < kParts; ++part) squares[part][i] = FloatsOf(parts[part]);
      }
      float* to = panels + at / kHeight * PanelOfA(p) + k * kParts * kHeight + at % kHeight * kUnit;
      for (int part = 0; part < kParts; ++part, to += kPart) {
        Transpose<V / 2>(squares[part]);
        for (int i = 0; i < V; ++i) Store(to + i * kUnit, squares[part][i]);
      }
    }
  }
}

template <typename T, int kParts>
void PackColumns(const Product& p, Block block, int64_t column, int64_t panels, float* packed, float* sums) {
  for (int64_t at = 0; sums && at < panels * kWidth; at += V) Store(sums + at, Floats{});
  for (int64_t k = 0; k < block.count; ++k) {
    for (int64_t at = 0; at < panels * kWidth; at += V) {
      Pairs parts[kParts];
      Floats sum = sums ? Load(sums + at) : Floats{};
      AcrossRows<T>(p.b, p.terms, block.first + k, column + at, p.columns - column - at, parts, sums ? &sum : nullptr);
      if (sums) Store(sums + at, sum);
      float* to = packed + (at / kWidth * block.count + k / kUnit * kUnit) * kParts * kWidth;
      to += k % kUnit * kWidth + at % kWidth;
      for (int i = 0; i < kParts; ++i) Store(to + i * kPart, FloatsOf(parts[i]));
    }
  }
}

// Panels of B where memory holds the transpose.
template <typename T, int kParts>
void PackTurnedColumns(const Product& p, Block block, int64_t column, int64_t panels, float* packed) {
  for (int64_t at = 0; at < panels * kWidth; at += V) {
    for (int64_t k = 0; k < block.count; k += V) {
      Floats squares[kParts][V];
      for (int i = 0; i < V; ++i) {
        Pairs parts[kParts];
        AlongRow<T>(p.b, p.terms, p.columns, column + at + i, 2 * (block.first + k), parts);
        for (int part = 0; part < kParts; ++part) squares[part][i] = FloatsOf(parts[part]);
      }
      float* to = packed + (at / kWidth * block.count + k) * kParts * kWidth + at % kWidth;
      for (int part = 0; part < kParts; ++part, to += kPart) {
        Transpose<V / 2>(squares[part]);
        for (int i = 0; i < V; ++i) Store(to + i * kWidth, squares[part][i]);
      }
    }
  }
}

void PackPanel(const Product& p, Block block, int64_t row, float* panel) {
  if (p.type == Type::kFloat32) return PackRows<float, 3>(p, block, row, panel);
  PackRows<uint16_t, 1>(p, block, row, panel);
}

void PackA(const Product& p, int64_t at, int64_t tile_row, int64_t tile_rows, float* packed) {
  const Block block = BlockAt(p, at);
  packed += PackedAAt(p, at, block, tile_row);
  if (p.type == Type::kFloat32) return PackTurnedRows<float, 3>(p, block, tile_row * kHeight, tile_rows, packed);
  PackTurnedRows<uint16_t, 1>(p, block, tile_row * kHeight, tile_rows, packed);
}

void PackB(const Product& p, int64_t at, int64_t panel, int64_t panels, float* packed, float* sums) {
  const Block block = BlockAt(p, at);
  const int64_t column = panel * kWidth;
  packed += PackedBAt(p, block, panel);
  if (p.type == Type::kFloat32) {
    p.b.turned ? PackTurnedColumns<float, 3>(p, block, column, panels, packed)
               : PackColumns<float, 3>(p, block, column, panels, packed, sums);
  } else if (p.b.type == Type::kFloat32) {
    p.b.turned ? PackTurnedColumns<float, 1>(p, block, column, panels, packed)
               : PackColumns<float, 1>(p, block, column, panels, packed, sums);
  } else {
    PackColumns<uint16_t, 1>(p, block, column, panels, packed, sums);
  }
}

// ---- tiles ----

// 8 tiles of 16 rows of 64 bytes: 0 to 3 have sums, 4 and 5 rows of A, 6 and 7 columns of B.
struct Config {
  alignas(64) uint8_t bytes[64] = {1};  // the palette
  constexpr Config() {
    for (int tile = 0; tile < 8; ++tile) bytes[16 + 2 * tile] = 64, bytes[48 + tile] = 16;
  }
};
constexpr Config kConfig;

INLINE void LoadSums(const float* sums, int64_t stride) {
  _tile_loadd(0, sums, stride * 4);
  _tile_loadd(1, sums + 16, stride * 4);
  _tile_loadd(2, sums + 16 * stride, stride * 4);
  _tile_loadd(3, sums + 16 * stride + 16, stride * 4);
}
INLINE void StoreSums(float* sums, int64_t stride) {
  _tile_stored(0, sums, stride * 4);
  _tile_stored(1, sums + 16, stride * 4);
  _tile_stored(2, sums + 16 * stride, stride * 4);
  _tile_stored(3, sums + 16 * stride + 16, stride * 4);
}
INLINE void LoadA(const float* a, bool two) {
  _tile_loadd(4, a, kUnit * 4);
  if (two) _tile_loadd(5, a + 16 * kUnit, kUnit * 4);
}
INLINE void LoadB(const float* b) {
  _tile_loadd(6, b, kWidth * 4);
  _tile_loadd(7, b + 16, kWidth * 4);
}
INLINE void AddProducts(bool two) {
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if (!two) return;
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

// Of float32: 0 where the mask says so.
float At(const Matrix& m, int64_t row, int64_t column) {
  const int64_t at = m.turned ? column * m.stride + row : row * m.stride + column;
  const float* mask = static_cast<const float*>(m.mask);
  return mask && !(mask[at] > 0) ? 0 : static_cast<const float*>(m.values)[at];
}

// The sums of a tile, term by term.
void AddUp(const Product& p, const Tile& t, float* sums) {
  for (int64_t r = 0; r < t.rows; ++r) {
    for (int64_t c = 0; c < kWidth && t.column + c < p.columns; ++c) {
      float sum = 0;
      for (int64_t k = 0; k < p.terms; ++k) sum += At(p.a, t.row + r, k) * At(p.b, k, t.column + c);
      sums[r * kWidth + c] = sum;
    }
  }
}

bool Finite(const float* sums, int64_t count) {
  Floats all{};
  for (int64_t i = 0; i < count; i += V) all += 0 * Load(sums + i);
  for (int i = 0; i < V; ++i) {
    if (all[i] != 0) return false;
  }
  return true;
}

// In C there may be no room for whole tiles.
INLINE bool NeedsSums(const Product& p) { return Blocks(p) > 1; }

void RunTile(const Product& p, const Tile& t) {
  const bool two = t.rows > 16;
  const float* a = t.a;
  const float* b = t.b;
  asm volatile("" ::: "memory");  // not all compilers know that loading a tile reads memory
  if (t.first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    LoadSums(t.sums, t.sums_stride);
  }
  if (p.type == Type::kBfloat16) {
    for (int64_t k = 0; k < t.steps; k += kUnit, a += kPart, b += kPart) {
      LoadA(a, two);
      LoadB(b);
      AddProducts(two);
    }
  } else {
    for (int64_t k = 0; k < t.steps; k += kUnit, a += 3 * kPart, b += 3 * kPart) {
      LoadB(b);  // parts of A and B: 2 and 0, 1 and 0, 1 and 1, 0 and 1, 0 and 2, 0 and 0
      LoadA(a + 2 * kPart, two);
      AddProducts(two);
      LoadA(a + kPart, two);
      AddProducts(two);
      LoadB(b + kPart);
      AddProducts(two);
      LoadA(a, two);
      AddProducts(two);
      LoadB(b + 2 * kPart);
      AddProducts(two);
      LoadB(b);
      AddProducts(two);
    }
  }
  if (!t.last) return StoreSums(t.sums, t.sums_stride);
  alignas(64) float sums[kHeight * kWidth];
  StoreSums(sums, kWidth);
  if (p.type == Type::kFloat32 && !Finite(sums, t.rows * kWidth)) AddUp(p, t, sums);
  Tile whole = t;
  whole.first = true;  // the sums of the blocks before are in these
  Finish(p, whole, sums, p.columns - t.column <= V ? V : kWidth);
}

}  // namespace
}  // namespace recjax

#include "multiply.inc"

namespace recjax {
namespace {

// With tiles of its own for the length of the call: others in this thread may have theirs.
void MultiplyOnTiles(const Product& p, const float* packed_a, const float* packed_b, int64_t tile_row,
                     int64_t tile_rows, int64_t panel, int64_t panels, float* scratch) {
  _tile_loadconfig(kConfig.bytes);
  Multiply(p, packed_a, packed_b, tile_row, tile_rows, panel, panels, scratch);
  _tile_release();
}

}  // namespace

const Products kAmxProducts = {
    kHeight, kWidth, Blocks, PackedASize, PackedBSize, ScratchSize, PackA, PackB, MultiplyOnTiles,
};

}  // namespace recjax
#endif

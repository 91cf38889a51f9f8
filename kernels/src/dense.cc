// XLA's view of a dense layer, y = act(x W + b): x [B, K], W [K, N] in float32, b [N] in float32 or [0] for none.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

#include "kernels.h"
#include "parallel.h"
#include "product.h"
#include "scratch.h"
#include "xla/ffi/api/ffi.h"

namespace recjax {
namespace {

namespace ffi = xla::ffi;

using Floats1 = ffi::Buffer<ffi::F32, 1>;
using Floats2 = ffi::Buffer<ffi::F32, 2>;

// Below this many multiplications a call is not worth another thread.
constexpr int64_t kAlone = 1 << 18;
// Rows or columns that are packed together, at most.
constexpr int64_t kLong = 512;
// Columns of C that one chunk takes, at most: more where each chunk packs its rows of A.
constexpr int64_t kColumns = 1024;
constexpr int64_t kColumnsOfTurned = 256;
// Rows of C that one chunk takes, in tiles, at most; fewer where the threads would not end together.
constexpr int64_t kRows = 8;

// C, and the sums of the columns of B if `column_sums` is not null. The sums do not depend on the number of threads.
void Run(ffi::ThreadPool& pool, const Product& p, float* column_sums = nullptr) {
  if (p.columns == 0) return;
  const Products& with = ChosenProducts(p);
  const int64_t threads = p.rows * p.columns * p.terms < kAlone ? 1 : Threads(pool);
  const int64_t panels = Ceil(p.columns, with.width), tile_rows = Ceil(p.rows, with.height), blocks = with.blocks(p);
  Scratch packed_a(with.packed_a_size(p)), packed_b(with.packed_b_size(p));
  Scratch sums(column_sums ? blocks * panels * with.width : 0);
  // Whole rows of memory at once, if they are not long.
  const int64_t a_size = Ceil(kLong, with.height), a_parts = p.a.turned ? Ceil(tile_rows, a_size) : 0;
  const int64_t b_size = Ceil(kLong, with.width), b_parts = Ceil(panels, b_size);
  const int64_t packs = blocks * (a_parts + b_parts);
  const auto pack = [&](int64_t i) {
    const int64_t block = i / (a_parts + b_parts), part = i % (a_parts + b_parts);
    if (part < a_parts) {
      with.pack_a(p, block, part * a_size, std::min(a_size, tile_rows - part * a_size), packed_a.data());
      return;
    }
    const int64_t panel = (part - a_parts) * b_size;
    with.pack_b(p, block, panel, std::min(b_size, panels - panel), packed_b.data(),
                column_sums ? sums.data() + (block * panels + panel) * with.width : nullptr);
  };

  int64_t width = std::min(panels, (p.a.turned ? kColumnsOfTurned : kColumns) / with.width);
  width = Ceil(panels, Ceil(panels, width));
  const int64_t height = std::clamp<int64_t>(tile_rows * Ceil(panels, width) / (8 * threads), 1, kRows);
  const int64_t down = Ceil(tile_rows, height);

  // One loop for both, since threads take their time to wake. Chunks are taken in order: all packing is under way when
  // the first thread waits for it.
  std::atomic<int64_t> packed{0};
  ParallelFor(pool, threads, packs + down * Ceil(panels, width), [&](int64_t i) {
    if (i < packs) {
      pack(i);
      packed.fetch_add(1, std::memory_order_release);
      return;
    }
    while (packed.load(std::memory_order_acquire) < packs) std::this_thread::yield();
    const int64_t row = (i - packs) % down * height, panel = (i - packs) / down * width;
    const int64_t rows = std::min(height, tile_rows - row), columns = std::min(width, panels - panel);
    Scratch scratch(with.scratch_size(p, rows, columns));
    with.multiply(p, packed_a.data(), packed_b.data(), row, rows, panel, columns, scratch.data());
  });
  if (!column_sums) return;
  for (int64_t column = 0; column < p.columns; ++column) {
    float sum = 0;
    for (int64_t block = 0; block < blocks; ++block) sum += sums.data()[block * panels * with.width + column];
    column_sums[column] = sum;
  }
}

ffi::ErrorOr<Type> TypeOf(const ffi::AnyBuffer& x) {
  if (x.dimensions().size() == 2 && x.element_type() == ffi::F32) return Type::kFloat32;
  if (x.dimensions().size() == 2 && x.element_type() == ffi::BF16) return Type::kBfloat16;
  return ffi::Unexpected(ffi::Error::InvalidArgument("x and y must have two dimensions, float32 or bfloat16"));
}

// x [B, K], kernel [K, N], y [B, N].
ffi::ErrorOr<Type> Check(const ffi::AnyBuffer& x, const Floats2& kernel, const ffi::AnyBuffer& y) {
  const auto type = TypeOf(x);
  if (!type.has_value()) return type;
  if (y.dimensions().size() != 2 || y.element_type() != x.element_type() || y.dimensions()[0] != x.dimensions()[0] ||
      kernel.dimensions()[0] != x.dimensions()[1] || kernel.dimensions()[1] != y.dimensions()[1]) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("shapes must be x [B, K], W [K, N], y [B, N], x and y alike"));
  }
  return type;
}

ffi::Error Forward(ffi::ThreadPool pool, ffi::AnyBuffer x, Floats2 kernel, Floats1 bias, ffi::Result<ffi::AnyBuffer> y,
                   bool relu) {
  const auto type = Check(x, kernel, *y);
  if (!type.has_value()) return type.error();
  const int64_t B = x.dimensions()[0], K = x.dimensions()[1], N = y->dimensions()[1];
  const bool biased = bias.dimensions()[0] != 0;
  if (biased && bias.dimensions()[0] != N) return ffi::Error::InvalidArgument("bias must be [N], or [0] for none");
  Product p{B, N, K, *type};
  p.a = {x.untyped_data(), *type, K, false, nullptr};
  p.b = {kernel.typed_data(), Type::kFloat32, N, false, nullptr};
  p.c = y->untyped_data(), p.c_type = *type, p.bias = biased ? bias.typed_data() : nullptr, p.relu = relu;
  Run(pool, p);
  return ffi::Error::Success();
}

// Of y, which tells where ReLU let the gradient through; null without it.
ffi::ErrorOr<const void*> MaskOf(const ffi::AnyBuffer& y, const ffi::AnyBuffer& dy) {
  if (y.element_count() == 0) return nullptr;
  if (y.element_count() != dy.element_count() || y.element_type() != dy.element_type()) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("y must be like its gradient, or [0, 0] without ReLU"));
  }
  return y.untyped_data();
}

ffi::Error IntoInput(ffi::ThreadPool pool, Floats2 kernel, ffi::AnyBuffer y, ffi::AnyBuffer dy,
                     ffi::Result<ffi::AnyBuffer> dx) {
  const auto type = Check(*dx, kernel, dy);
  if (!type.has_value()) return type.error();
  const auto mask = MaskOf(y, dy);
  if (!mask.has_value()) return mask.error();
  const int64_t B = dy.dimensions()[0], K = dx->dimensions()[1], N = dy.dimensions()[1];
  Product p{B, K, N, *type};
  p.a = {dy.untyped_data(), *type, N, false, *mask};
  p.b = {kernel.typed_data(), Type::kFloat32, N, true, nullptr};
  p.c = dx->untyped_data(), p.c_type = *type, p.bias = nullptr, p.relu = false;
  Run(pool, p);
  return ffi::Error::Success();
}

ffi::Error IntoKernel(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer y, ffi::AnyBuffer dy,
                      ffi::Result<Floats2> dkernel, ffi::Result<Floats1> dbias) {
  const auto type = Check(x, *dkernel, dy);
  if (!type.has_value()) return type.error();
  const auto mask = MaskOf(y, dy);
  if (!mask.has_value()) return mask.error();
  const int64_t B = x.dimensions()[0], K = x.dimensions()[1], N = dy.dimensions()[1];
  const bool biased = dbias->dimensions()[0] != 0;
  if (biased && dbias->dimensions()[0] != N) return ffi::Error::InvalidArgument("bias must be [N], or [0] for none");
  Product p{K, N, B, *type};
  p.a = {x.untyped_data(), *type, K, true, nullptr};
  p.b = {dy.untyped_data(), *type, N, false, *mask};
  p.c = dkernel->typed_data(), p.c_type = Type::kFloat32, p.bias = nullptr, p.relu = false;
  Run(pool, p, biased ? dbias->typed_data() : nullptr);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace recjax

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(recjax_dense_forward, recjax::Forward,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<recjax::Floats2>()
                                  .Arg<recjax::Floats1>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<bool>("relu"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(recjax_dense_into_input, recjax::IntoInput,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<recjax::Floats2>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(recjax_dense_into_kernel, recjax::IntoKernel,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<recjax::Floats2>()
                                  .Ret<recjax::Floats1>());

#pragma GCC visibility pop

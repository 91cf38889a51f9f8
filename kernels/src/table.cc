// Work on a table in place: bags summed straight from it, and the update of row-wise Adagrad.
#include <cmath>
#include <cstdint>
#include <memory>

#include "kernels.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

#if defined(__x86_64__)
#define RECJAX_VECTORS __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define RECJAX_VECTORS
#endif

namespace recjax {

namespace ffi = xla::ffi;

namespace {

using Floats = ffi::Buffer<ffi::F32, 2>;
using FloatList = ffi::Buffer<ffi::F32, 1>;
using Ids = ffi::Buffer<ffi::S32, 2>;
using IdList = ffi::Buffer<ffi::S32, 1>;

// Bags whose rows are named by their place in a list of slots: sums[n] = sum over h of table[slots[inverse[n, h]]].
// The slots of a chunk are looked up first, and stay in the cache.
ffi::Error TableBags(ffi::ThreadPool pool, Floats table, IdList slots, Ids inverse, Floats weights,
                     ffi::Result<Floats> pooled) {
  const int64_t R = table.dimensions()[0], D = table.dimensions()[1], C = slots.element_count();
  const int64_t bags = inverse.dimensions()[0], H = inverse.dimensions()[1];
  const float* each = weights.element_count() == 0 ? nullptr : weights.typed_data();
  if (pooled->dimensions()[0] != bags || pooled->dimensions()[1] != D ||
      (each && static_cast<int64_t>(weights.element_count()) != bags * H)) {
    return ffi::Error::InvalidArgument("shapes must be table [R, D], inverse and weights [N, H], pooled [N, D]");
  }
  const Bags shape{R, H, D};
  ParallelRange(pool, bags, (H + 1) * D, [&](int64_t begin, int64_t end) {
    std::unique_ptr<int32_t[]> rows(new int32_t[(end - begin) * H]);
    const int32_t* from = inverse.typed_data() + begin * H;
    for (int64_t i = 0; i < (end - begin) * H; ++i) rows[i] = IsRow(from[i], C) ? slots.typed_data()[from[i]] : -1;
    Chosen().bags_forward(shape, end - begin, table.typed_data(), rows.get(), each ? each + begin * H : nullptr,
                          pooled->typed_data() + begin * D);
  });
  return ffi::Error::Success();
}

struct RowWiseAdagrad {
  float scale;  // of the gradients
  float rate;   // learning rate
  float eps;
  float l2;
  float keep;  // what the decoupled decay leaves of a weight
};

constexpr int64_t kAhead = 8;  // rows between the one that is updated and the one that is fetched
constexpr int kLanes = 16;     // partial sums of a mean: the order of additions is the same for all instruction sets

RECJAX_VECTORS void UpdateRows(const RowWiseAdagrad& rule, int64_t rows, int64_t D, int64_t begin, int64_t end,
                               const int32_t* touched, const float* __restrict grads, float* __restrict table,
                               float* __restrict sums) {
  for (int64_t m = begin; m < end; ++m) {
    if (m + kAhead < end && IsRow(touched[m + kAhead], rows)) {
      const float* next = table + touched[m + kAhead] * D;
      for (int64_t d = 0; d < D; d += 16) __builtin_prefetch(next + d, 1);
      __builtin_prefetch(sums + touched[m + kAhead], 1);
    }
    if (!IsRow(touched[m], rows)) continue;
    const float* __restrict grad = grads + m * D;
    float* __restrict row = table + touched[m] * D;
    float partial[kLanes] = {};
    int64_t d = 0;
    for (; d + kLanes <= D; d += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const float g = grad[d + lane] * rule.scale + rule.l2 * row[d + lane];
        partial[lane] += g * g;
      }
    }
    for (int lane = 0; d + lane < D; ++lane) {
      const float g = grad[d + lane] * rule.scale + rule.l2 * row[d + lane];
      partial[lane] += g * g;
    }
    for (int half = kLanes / 2; half; half /= 2) {
      for (int lane = 0; lane < half; ++lane) partial[lane] += partial[lane + half];
    }
    const float sum = sums[touched[m]] + partial[0] / static_cast<float>(D);
    sums[touched[m]] = sum;
    const float step = rule.rate / (std::sqrt(sum) + rule.eps);
    for (d = 0; d < D; ++d) {
      const float g = grad[d] * rule.scale + rule.l2 * row[d];
      row[d] = row[d] * rule.keep - step * g;
    }
  }
}

// `scalars` are [scale of the gradients, learning rate, 1 or 0 to change nothing]. Slots beyond the table are unused
// entries; no slot stands twice. Table and sums are updated in place: each is its own result's buffer.
ffi::Error UpdateRowWiseAdagrad(ffi::ThreadPool pool, Floats table, FloatList sums, IdList touched, Floats grads,
                                FloatList scalars, ffi::Result<Floats> new_table, ffi::Result<FloatList> new_sums,
                                float eps, float l2, float weight_decay) {
  const int64_t R = table.dimensions()[0], D = table.dimensions()[1], M = touched.element_count();
  if (static_cast<int64_t>(sums.element_count()) != R || grads.dimensions()[0] != M || grads.dimensions()[1] != D ||
      scalars.element_count() != 3) {
    return ffi::Error::InvalidArgument("shapes must be table [R, D], sums [R], touched [M], grads [M, D], scalars [3]");
  }
  if (new_table->typed_data() != table.typed_data() || new_sums->typed_data() != sums.typed_data()) {
    return ffi::Error::Internal("table and sums are not updated in place");
  }
  const float* given = scalars.typed_data();
  if (given[2] == 0) return ffi::Error::Success();
  const RowWiseAdagrad rule{given[0], given[1], eps, l2, 1 - given[1] * weight_decay};
  ParallelRange(pool, M, 8 * D, [&](int64_t begin, int64_t end) {
    UpdateRows(rule, R, D, begin, end, touched.typed_data(), grads.typed_data(), new_table->typed_data(),
               new_sums->typed_data());
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace recjax

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(recjax_table_bags, recjax::TableBags,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<recjax::Floats>()
                                  .Arg<recjax::IdList>()
                                  .Arg<recjax::Ids>()
                                  .Arg<recjax::Floats>()
                                  .Ret<recjax::Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(recjax_update_rowwise_adagrad, recjax::UpdateRowWiseAdagrad,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<recjax::Floats>()
                                  .Arg<recjax::FloatList>()
                                  .Arg<recjax::IdList>()
                                  .Arg<recjax::Floats>()
                                  .Arg<recjax::FloatList>()
                                  .Ret<recjax::Floats>()
                                  .Ret<recjax::FloatList>()
                                  .Attr<float>("eps")
                                  .Attr<float>("l2")
                                  .Attr<float>("weight_decay"));

#pragma GCC visibility pop

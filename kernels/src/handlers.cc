// XLA's view of the kernels: handlers that check shapes, share the work among threads, and call the variant.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.h"
#include "parallel.h"
#include "product.h"
#include "xla/ffi/api/ffi.h"

namespace recjax {
namespace {

namespace ffi = xla::ffi;

struct Choice {
  const char* name;
  const Kernels* kernels;
  const Products* products;
  const Products* on_tiles;  // where there is enough to fill them; null if the processor has none
};

#if defined(__x86_64__)

#if defined(RECJAX_AMX)

// Whether the processor has AMX for bfloat16, and the system lets this process use its tiles, for which it must be
// asked once.
bool HasTiles() {
#if defined(__linux__)
  unsigned a, b, c, d;
  constexpr unsigned kBoth = 1u << 22 | 1u << 24;  // AMX-BF16 and AMX-TILE
  constexpr int kAskFor = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kBoth) == kBoth &&
         syscall(SYS_arch_prctl, kAskFor, kTileData) == 0;
#else
  return false;
#endif
}

constexpr Choice kAmx{"avx512_amx", &kAvx512Bf16, &kAvx512Bf16Products, &kAmxProducts};

#endif

constexpr Choice kPairs{"avx512_bf16", &kAvx512Bf16, &kAvx512Bf16Products, nullptr};
constexpr Choice kWide{"avx512", &kAvx512, &kAvx512Products, nullptr};
constexpr Choice kNarrow{"avx2", &kAvx2, &kAvx2Products, nullptr};

#endif

constexpr Choice kAny{"plain", &kPlain, &kPlainProducts, nullptr};

// The choice of that name, or the best if null; null where this processor lacks its instructions.
const Choice* Supported(const char* name) {
  const auto wanted = [name](const Choice& choice) { return !name || !std::strcmp(name, choice.name); };
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool pairs = avx512 && __builtin_cpu_supports("avx512bf16");
#if defined(RECJAX_AMX)
  if (pairs && wanted(kAmx) && HasTiles()) return &kAmx;
#endif
  if (pairs && wanted(kPairs)) return &kPairs;
  if (avx512 && wanted(kWide)) return &kWide;
  if (avx2 && wanted(kNarrow)) return &kNarrow;
#endif
  return wanted(kAny) ? &kAny : nullptr;
}

std::atomic<const Choice*> chosen{Supported(nullptr)};

}  // namespace

const Kernels& Chosen() { return *chosen.load()->kernels; }

const Products& ChosenProducts(const Product& p) {
  constexpr int64_t kEnough = 32;  // of float32: below, taking factors apart costs more than tiles save
  const Choice& choice = *chosen.load();
  const bool enough = p.type == Type::kBfloat16 || (p.rows >= kEnough && p.columns >= kEnough && p.terms >= kEnough);
  return choice.on_tiles && enough ? *choice.on_tiles : *choice.products;
}

namespace {

// ---- interaction ----

ffi::ErrorOr<Interaction> InteractionShape(const ffi::AnyBuffer& vectors, const ffi::AnyBuffer& products,
                                           bool itself) {
  const auto dims = vectors.dimensions();
  const auto type = vectors.element_type();
  if (dims.size() != 3 || (type != ffi::F32 && type != ffi::BF16) || products.element_type() != type) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("vectors must be [B, F, D], float32 or bfloat16"));
  }
  Interaction shape{dims[1], dims[2], itself, type == ffi::F32 ? Type::kFloat32 : Type::kBfloat16};
  const auto out = products.dimensions();
  if (out.size() != 2 || out[0] != dims[0] || out[1] != shape.products()) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("products must be [B, P]"));
  }
  return shape;
}

// Runs run(first sample, samples, scratch) over all samples.
void OverSamples(ffi::ThreadPool& pool, const Interaction& shape, int64_t samples,
                 const std::function<void(int64_t, int64_t, float*)>& run) {
  ParallelRange(pool, samples, shape.vectors * shape.vectors * shape.dim / 16, [&](int64_t begin, int64_t end) {
    std::unique_ptr<float[]> scratch(new float[Chosen().interaction_scratch(shape)]);
    run(begin, end - begin, scratch.get());
  });
}

ffi::Error InteractionForward(ffi::ThreadPool pool, ffi::AnyBuffer vectors, ffi::Result<ffi::AnyBuffer> products,
                              bool itself) {
  const auto checked = InteractionShape(vectors, *products, itself);
  if (!checked.has_value()) return checked.error();
  const Interaction shape = *checked;
  const int64_t item = shape.type == Type::kFloat32 ? 4 : 2;
  const char* from = static_cast<const char*>(vectors.untyped_data());
  char* to = static_cast<char*>(products->untyped_data());
  OverSamples(pool, shape, vectors.dimensions()[0], [&](int64_t first, int64_t samples, float* scratch) {
    Chosen().interaction_forward(shape, samples, from + first * shape.vectors * shape.dim * item,
                                 to + first * shape.products() * item, scratch);
  });
  return ffi::Error::Success();
}

ffi::Error InteractionBackward(ffi::ThreadPool pool, ffi::AnyBuffer vectors, ffi::AnyBuffer cotangents,
                               ffi::Result<ffi::AnyBuffer> gradients, bool itself) {
  const auto checked = InteractionShape(vectors, cotangents, itself);
  if (!checked.has_value()) return checked.error();
  const Interaction shape = *checked;
  if (gradients->element_type() != vectors.element_type() || gradients->element_count() != vectors.element_count()) {
    return ffi::Error::InvalidArgument("gradients must be like vectors");
  }
  const int64_t item = shape.type == Type::kFloat32 ? 4 : 2;
  const char* from = static_cast<const char*>(vectors.untyped_data());
  const char* with = static_cast<const char*>(cotangents.untyped_data());
  char* to = static_cast<char*>(gradients->untyped_data());
  OverSamples(pool, shape, vectors.dimensions()[0], [&](int64_t first, int64_t samples, float* scratch) {
    const int64_t at = first * shape.vectors * shape.dim * item;
    Chosen().interaction_backward(shape, samples, from + at, with + first * shape.products() * item, to + at,
                                  scratch);
  });
  return ffi::Error::Success();
}

// ---- bags ----

using Rows = ffi::Buffer<ffi::F32, 2>;
using Ids = ffi::Buffer<ffi::S32, 2>;

// `weights` is [N, H], or [0, 0] where every id counts once.
ffi::Error CheckBags(const Rows& rows, const Ids& inverse, const Rows& weights, const Rows& pooled) {
  const bool same_weights = weights.element_count() == 0 || (weights.dimensions()[0] == inverse.dimensions()[0] &&
                                                             weights.dimensions()[1] == inverse.dimensions()[1]);
  if (!same_weights || pooled.dimensions()[0] != inverse.dimensions()[0] ||
      pooled.dimensions()[1] != rows.dimensions()[1]) {
    return ffi::Error::InvalidArgument("shapes must be rows [U, D], inverse and weights [N, H], pooled [N, D]");
  }
  return ffi::Error::Success();
}

const float* WeightsOrNull(const Rows& weights) {
  return weights.element_count() == 0 ? nullptr : weights.typed_data();
}

ffi::Error BagsForward(ffi::ThreadPool pool, Rows rows, Ids inverse, Rows weights, ffi::Result<Rows> pooled) {
  if (ffi::Error error = CheckBags(rows, inverse, weights, *pooled); error.failure()) return error;
  const Bags shape{rows.dimensions()[0], inverse.dimensions()[1], rows.dimensions()[1]};
  const float* each = WeightsOrNull(weights);
  ParallelRange(pool, inverse.dimensions()[0], (shape.ids + 1) * shape.dim, [&](int64_t begin, int64_t end) {
    Chosen().bags_forward(shape, end - begin, rows.typed_data(), inverse.typed_data() + begin * shape.ids,
                          each ? each + begin * shape.ids : nullptr, pooled->typed_data() + begin * shape.dim);
  });
  return ffi::Error::Success();
}

// Every row's gradient is the sum over its occurrences in the order of the ids, whatever the number of threads.
//
// Terms are first sorted, stably, by ranges of rows that fit into a core's cache; each range is then summed by one
// thread. Summing straight into [U, D] instead would miss the cache at nearly every id.
constexpr int64_t kRangeBytes = 256 << 10;

ffi::Error BagsBackward(ffi::ThreadPool pool, Ids inverse, Rows weights, Rows cotangents,
                        ffi::Result<Rows> gradients) {
  if (ffi::Error error = CheckBags(*gradients, inverse, weights, cotangents); error.failure()) return error;
  const int64_t U = gradients->dimensions()[0], D = gradients->dimensions()[1], H = inverse.dimensions()[1];
  const int64_t bags = inverse.dimensions()[0], all = bags * H;
  if (U == 0 || D == 0) return ffi::Error::Success();
  const int32_t* ids = inverse.typed_data();
  const float* each = WeightsOrNull(weights);
  const int64_t threads = std::max(D * (all + U) < kGrain ? 1 : Threads(pool), int64_t{1});

  int shift = 0;  // 2^shift rows a range: as many as fit, fewer if threads would have nothing to do
  while ((D << (shift + 1)) * 4 <= kRangeBytes) ++shift;
  while (threads > 1 && shift > 4 && Ceil(U, int64_t{1} << shift) < 4 * threads) --shift;
  const int64_t ranges = Ceil(U, int64_t{1} << shift);
  const int64_t blocks = std::min<int64_t>(threads == 1 ? 1 : 8 * threads, std::max<int64_t>(bags, 1));
  const int64_t bags_a_block = Ceil(bags, blocks);

  // ends[block][range]: how many terms, then where the block's terms of that range go next.
  std::vector<int64_t> ends(blocks * ranges);
  ParallelFor(pool, threads, blocks, [&](int64_t block) {
    int64_t* counts = ends.data() + block * ranges;
    const int64_t end = std::min(all, (block + 1) * bags_a_block * H);
    for (int64_t at = block * bags_a_block * H; at < end; ++at) {
      if (IsRow(ids[at], U)) ++counts[ids[at] >> shift];
    }
  });
  std::vector<int64_t> starts(ranges + 1);
  int64_t total = 0;
  for (int64_t range = 0; range < ranges; ++range) {
    starts[range] = total;
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t count = ends[block * ranges + range];
      ends[block * ranges + range] = total;
      total += count;
    }
  }
  starts[ranges] = total;

  std::unique_ptr<int32_t[]> memory(new int32_t[(each ? 3 : 2) * total]);
  const Terms terms{memory.get(), memory.get() + total,
                    each ? reinterpret_cast<float*>(memory.get() + 2 * total) : nullptr};
  ParallelFor(pool, threads, blocks, [&](int64_t block) {
    int64_t* next = ends.data() + block * ranges;
    const int64_t last = std::min(bags, (block + 1) * bags_a_block);
    for (int64_t bag = block * bags_a_block; bag < last; ++bag) {
      for (int64_t at = bag * H; at < (bag + 1) * H; ++at) {
        if (!IsRow(ids[at], U)) continue;
        const int64_t to = next[ids[at] >> shift]++;
        terms.row[to] = ids[at];
        terms.bag[to] = static_cast<int32_t>(bag);
        if (each) terms.weight[to] = each[at];
      }
    }
  });

  ParallelFor(pool, threads, ranges, [&](int64_t range) {
    const int64_t first = range << shift, last = std::min(U, (range + 1) << shift);
    float* to = gradients->typed_data();
    std::memset(to + first * D, 0, sizeof(float) * (last - first) * D);
    Chosen().bags_add(D, terms, starts[range], starts[range + 1], cotangents.typed_data(), to);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace recjax

#pragma GCC visibility push(default)

extern "C" const char* recjax_instruction_set() { return recjax::chosen.load()->name; }

// For tests: takes another variant from now on, and says whether this processor can run it.
extern "C" bool recjax_use(const char* name) {
  const recjax::Choice* choice = recjax::Supported(name);
  if (choice) recjax::chosen = choice;
  return choice != nullptr;
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(recjax_interaction_forward, recjax::InteractionForward,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<bool>("itself"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(recjax_interaction_backward, recjax::InteractionBackward,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<bool>("itself"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(recjax_bags_forward, recjax::BagsForward,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<recjax::Rows>()
                                  .Arg<recjax::Ids>()
                                  .Arg<recjax::Rows>()
                                  .Ret<recjax::Rows>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(recjax_bags_backward, recjax::BagsBackward,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<recjax::Ids>()
                                  .Arg<recjax::Rows>()
                                  .Arg<recjax::Rows>()
                                  .Ret<recjax::Rows>());

#pragma GCC visibility pop

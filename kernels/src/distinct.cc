// The distinct ones of many integers, and where each stands among them: what routing spends its time on. Called from
// Python directly, by threads that prepare batches; each call is the work of one thread.
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#define RECJAX_POPCOUNT __attribute__((target_clones("popcnt", "default")))
#else
#define RECJAX_POPCOUNT
#endif

namespace recjax {
namespace {

struct Word {
  uint64_t bits;   // which of 64 keys there are
  uint64_t before; // how many distinct keys there are below them
};

// One bit for each possible key. With few of them for each key that there is, all stays in the cache.
template <typename Key>
RECJAX_POPCOUNT int64_t ByBits(const Key* keys, int64_t n, int64_t limit, Key* found, int32_t* inverse) {
  thread_local std::vector<Word> words;  // kept: new memory costs more than the work
  words.assign(limit / 64 + 1, Word{0, 0});
  for (int64_t i = 0; i < n; ++i) words[keys[i] >> 6].bits |= uint64_t{1} << (keys[i] & 63);
  int64_t count = 0;
  for (int64_t w = 0; w < static_cast<int64_t>(words.size()); ++w) {
    words[w].before = count;
    for (uint64_t bits = words[w].bits; bits; bits &= bits - 1) {
      found[count++] = static_cast<Key>(w * 64 + __builtin_ctzll(bits));
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    const Word& word = words[keys[i] >> 6];
    const uint64_t below = word.bits & ((uint64_t{1} << (keys[i] & 63)) - 1);
    inverse[i] = static_cast<int32_t>(word.before + __builtin_popcountll(below));
  }
  return count;
}

// A radix sort from the lowest digit up.
template <typename Key>
int64_t BySorting(const Key* keys, int64_t n, int64_t limit, Key* found, int32_t* inverse) {
  constexpr int kBits = 11;
  constexpr int64_t kDigits = 1 << kBits;
  struct Item {
    Key key;
    int32_t at;
  };
  thread_local std::vector<Item> from, to;
  from.resize(n);
  to.resize(n);
  for (int64_t i = 0; i < n; ++i) from[i] = {keys[i], static_cast<int32_t>(i)};
  std::vector<int64_t> next(kDigits);
  for (int shift = 0; shift < 63 && (limit - 1) >> shift; shift += kBits) {
    std::memset(next.data(), 0, sizeof(int64_t) * kDigits);
    for (int64_t i = 0; i < n; ++i) ++next[(from[i].key >> shift) & (kDigits - 1)];
    int64_t total = 0;
    for (int64_t& start : next) total += std::exchange(start, total);
    for (int64_t i = 0; i < n; ++i) to[next[(from[i].key >> shift) & (kDigits - 1)]++] = from[i];
    std::swap(from, to);
  }
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (i == 0 || from[i].key != from[i - 1].key) found[count++] = from[i].key;
    inverse[from[i].at] = static_cast<int32_t>(count - 1);
  }
  return count;
}

template <typename Key>
int64_t Distinct(const void* keys, int64_t n, int64_t limit, void* found, int32_t* inverse) {
  const bool dense = limit / 64 <= 4 * n + 1024;
  return (dense ? ByBits<Key> : BySorting<Key>)(static_cast<const Key*>(keys), n, limit, static_cast<Key*>(found),
                                                inverse);
}

}  // namespace
}  // namespace recjax

// `keys` are n integers of 4 or 8 bytes, from 0 to limit - 1. Writes the distinct ones to `found`, ascending, which has
// room for n; of each key its place there to `inverse`; and returns how many there are.
extern "C" __attribute__((visibility("default"))) int64_t recjax_distinct(const void* keys, int32_t bytes, int64_t n,
                                                                          int64_t limit, void* found,
                                                                          int32_t* inverse) {
  return (bytes == 4 ? recjax::Distinct<int32_t> : recjax::Distinct<int64_t>)(keys, n, limit, found, inverse);
}

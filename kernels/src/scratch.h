// Memory for the length of a call, kept for the next one: fresh pages from the system cost more than filling them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace recjax {

// Floats, not initialised, at the start of a cache line.
class Scratch {
 public:
  explicit Scratch(int64_t floats) : block_(Take(sizeof(float) * static_cast<size_t>(floats))) {}
  ~Scratch() { Give(block_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  float* data() const { return static_cast<float*>(block_.memory); }

 private:
  struct Block {
    void* memory;
    size_t bytes;
  };
  struct Kept {
    std::mutex mutex;
    std::vector<Block> blocks;  // free ones, by size
    size_t bytes = 0;
  };
  static constexpr size_t kMostKept = size_t{256} << 20;
  static constexpr size_t kHuge = size_t{2} << 20;

  static Kept& All() {
    static Kept* kept = new Kept;  // never destroyed: threads may still run at exit
    return *kept;
  }

  static Block Take(size_t bytes) {
    Kept& all = All();
    {
      std::lock_guard<std::mutex> lock(all.mutex);
      for (auto block = all.blocks.begin(); block != all.blocks.end(); ++block) {
        if (block->bytes < bytes) continue;
        if (block->bytes > 4 * bytes + kHuge) break;  // a large one may be wanted elsewhere at once
        const Block found = *block;
        all.blocks.erase(block);
        all.bytes -= found.bytes;
        return found;
      }
    }
    const size_t unit = bytes < kHuge ? size_t{4096} : kHuge;
    const size_t size = (bytes + unit - 1) / unit * unit + (bytes == 0 ? unit : 0);
    void* memory = std::aligned_alloc(unit, size);
    if (!memory) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    if (unit == kHuge) madvise(memory, size, MADV_HUGEPAGE);
#endif
    return {memory, size};
  }

  static void Give(Block block) {
    Kept& all = All();
    {
      std::lock_guard<std::mutex> lock(all.mutex);
      if (all.bytes + block.bytes <= kMostKept) {
        auto at = all.blocks.begin();
        while (at != all.blocks.end() && at->bytes < block.bytes) ++at;
        all.blocks.insert(at, block);
        all.bytes += block.bytes;
        return;
      }
    }
    std::free(block.memory);
  }

  const Block block_;
};

}  // namespace recjax

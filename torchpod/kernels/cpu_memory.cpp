// Memory of tensors on a CPU: what is freed is kept, by size, and given out again. See cpu_memory.py.

#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <mutex>

namespace {

constexpr size_t LINE = 64;  // bytes; torch aligns tensors to as many
constexpr size_t SPARE = 64 << 20;

// In front of each block, a cache line before its data.
struct Block {
  size_t bucket;
  Block* next;
};

struct Size {
  size_t bucket, bytes;
};

// The sizes that there are: up to 512 bytes multiples of 64, then eight in each octave, so that at most an eighth of a
// block is lost.
Size size_for(size_t bytes) {
  if (bytes <= 8 * LINE) {
    const size_t lines = std::max<size_t>(1, (bytes + LINE - 1) / LINE);
    return {lines, lines * LINE};
  }
  const size_t octave = 63 - __builtin_clzll(bytes - 1), shift = octave - 3;
  const size_t eighths = ((bytes - 1) >> shift) + 1;  // 9 to 16
  return {(octave - 8) * 8 + eighths - 8, eighths << shift};
}

size_t bytes_of(size_t bucket) {
  if (bucket <= 8) return bucket * LINE;
  const size_t octave = (bucket - 1) / 8 + 8, eighths = (bucket - 1) % 8 + 9;
  return eighths << (octave - 3);
}

constexpr size_t BUCKETS = 8 * 56;

void give_back(void* data);

class Cache final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &give_back, cpu};
    const Size size = size_for(bytes);
    TORCH_CHECK(size.bucket < BUCKETS, "cannot allocate ", bytes, " bytes");
    Block* block = take(size);
    if (!block) block = make(size);
    void* data = reinterpret_cast<char*>(block) + LINE;
    report(data, size.bytes);
    return {data, data, &give_back, cpu};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }

  void keep(Block* block) {
    report(reinterpret_cast<char*>(block) + LINE, -static_cast<int64_t>(bytes_of(block->bucket)));
    const std::lock_guard<std::mutex> guard(mutex);
    block->next = free_blocks[block->bucket];
    free_blocks[block->bucket] = block;
    used -= bytes_of(block->bucket);
    kept += bytes_of(block->bucket);
  }

  std::mutex mutex;
  size_t used = 0, kept = 0, most_used = 0;

 private:
  // To torch.profiler.
  void report(void* data, int64_t bytes) {
    if (c10::memoryProfilingEnabled())
      c10::reportMemoryUsageToProfiler(data, bytes, used, used + kept, c10::Device(c10::DeviceType::CPU));
  }

  Block* take(Size size) {
    const std::lock_guard<std::mutex> guard(mutex);
    used += size.bytes;
    Block* block = free_blocks[size.bucket];
    if (block) {
      free_blocks[size.bucket] = block->next;
      kept -= size.bytes;
      most_used = std::max(most_used, used);
    } else {
      const size_t most = std::max(most_used, used), allowed = most + most / 4 + SPARE;
      if (used + kept > allowed) shrink(allowed > used ? allowed - used : 0);
    }
    return block;
  }

  Block* make(Size size) {
    void* memory = nullptr;
    if (posix_memalign(&memory, LINE, size.bytes + LINE)) {
      const std::lock_guard<std::mutex> guard(mutex);
      shrink(0);
      if (posix_memalign(&memory, LINE, size.bytes + LINE)) {
        used -= size.bytes;
        TORCH_CHECK_WITH(OutOfMemoryError, false, "not enough memory: cannot allocate ", size.bytes, " bytes");
      }
    }
    const std::lock_guard<std::mutex> guard(mutex);
    most_used = std::max(most_used, used);
    Block* block = static_cast<Block*>(memory);
    block->bucket = size.bucket;
    return block;
  }

  // Frees what is kept, large blocks first, down to so many bytes.
  void shrink(size_t bytes) {
    for (size_t bucket = BUCKETS - 1; bucket > 0; bucket--)
      while (kept > bytes && free_blocks[bucket]) {
        Block* block = free_blocks[bucket];
        free_blocks[bucket] = block->next;
        kept -= bytes_of(bucket);
        free(block);
      }
  }

  Block* free_blocks[BUCKETS] = {};
};

Cache& cache() {
  static Cache* const one = new Cache;  // never destroyed: tensors may outlive everything
  return *one;
}

void give_back(void* data) {
  if (data) cache().keep(reinterpret_cast<Block*>(static_cast<char*>(data) - LINE));
}

}  // namespace

extern "C" void torchpod_install() {
  static std::once_flag once;
  std::call_once(once, [] {
    c10::SetCPUAllocator(&cache(), 1);
    pthread_atfork([] { cache().mutex.lock(); }, [] { cache().mutex.unlock(); }, [] { cache().mutex.unlock(); });
  });
}

// Bytes of tensors that are alive, kept for later, and the most that were alive.
extern "C" void torchpod_memory(int64_t* numbers) {
  const std::lock_guard<std::mutex> guard(cache().mutex);
  numbers[0] = cache().used;
  numbers[1] = cache().kept;
  numbers[2] = cache().most_used;
}

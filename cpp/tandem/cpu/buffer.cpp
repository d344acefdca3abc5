#include "tandem/cpu/buffer.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <new>
#include <utility>

namespace tandem::cpu {

namespace {
constexpr std::int64_t kHugePage = std::int64_t{2} << 20;
constexpr std::int64_t kCacheLine = 64;
constexpr std::int64_t kWeightBlock = 8 * kHugePage;  // untouched memory of it costs nothing
}  // namespace

void prefer_huge_pages(std::byte* data, std::int64_t num_bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(data), huge = static_cast<std::uintptr_t>(kHugePage);
  const std::uintptr_t first = (begin + huge - 1) / huge * huge;
  const std::uintptr_t end = (begin + static_cast<std::uintptr_t>(num_bytes)) / huge * huge;
  if (first >= end) return;
  static_cast<void>(madvise(data + (first - begin), end - first, MADV_HUGEPAGE));
}

AlignedBuffer::AlignedBuffer(std::int64_t num_bytes) : num_bytes_(num_bytes) {
  const std::int64_t alignment = num_bytes >= kHugePage ? kHugePage : kCacheLine;
  const std::int64_t rounded = (num_bytes + alignment - 1) / alignment * alignment;
  void* data = std::aligned_alloc(static_cast<std::size_t>(alignment), static_cast<std::size_t>(rounded));
  if (data == nullptr) throw std::bad_alloc();
  data_.reset(static_cast<std::byte*>(data));
  prefer_huge_pages(data_.get(), rounded);
}

void AlignedBuffer::Free::operator()(std::byte* data) const { std::free(data); }

WeightBuffer::WeightBuffer(std::int64_t num_bytes) : num_bytes_(num_bytes) {
  struct Block {
    explicit Block(std::int64_t size) : memory(size) {}
    AlignedBuffer memory;
    std::int64_t used = 0;
  };
  static std::mutex mutex;
  static std::weak_ptr<Block> open;  // the newest block, while a weight in it lives
  const std::lock_guard lock(mutex);
  std::shared_ptr<Block> block = open.lock();
  const std::int64_t rounded = (num_bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
  if (block == nullptr || block->used + rounded > block->memory.num_bytes()) {
    block = std::make_shared<Block>(std::max(rounded, kWeightBlock));
    open = block;
  }
  std::byte* data = block->memory.data() + block->used;
  block->used += rounded;
  data_ = std::shared_ptr<std::byte>(std::move(block), data);
}

float* scratch_floats(Scratch purpose, std::int64_t count) {
  thread_local std::array<AlignedBuffer, static_cast<std::size_t>(Scratch::Count)> buffers;
  AlignedBuffer& buffer = buffers[static_cast<std::size_t>(purpose)];
  const std::int64_t num_bytes = count * static_cast<std::int64_t>(sizeof(float));
  if (buffer.num_bytes() < num_bytes) {
    buffer = AlignedBuffer();  // first release, then take: scratch holds nothing between uses
    buffer = AlignedBuffer(num_bytes + num_bytes / 4);
  }
  return reinterpret_cast<float*>(buffer.data());
}

}  // namespace tandem::cpu

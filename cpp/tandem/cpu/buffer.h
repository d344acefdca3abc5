#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace tandem::cpu {

// Asks the kernel for huge pages in memory that is read in long runs: there are fewer translations to look up. Advice
// only: without them the memory is as good, just slower.
void prefer_huge_pages(std::byte* data, std::int64_t num_bytes);

// Memory aligned for vectors; large ones ask the kernel for huge pages, since a weight is streamed through once per
// step.
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(std::int64_t num_bytes);

  [[nodiscard]] std::byte* data() const { return data_.get(); }
  [[nodiscard]] std::int64_t num_bytes() const { return num_bytes_; }

 private:
  struct Free {
    void operator()(std::byte* data) const;
  };
  std::unique_ptr<std::byte[], Free> data_;
  std::int64_t num_bytes_ = 0;
};

// Memory for one weight out of a block that many share, in the order of the calls: so a weight of any size lies in huge
// pages, and the one that is read after it usually follows it. The block is freed with the last of its weights.
class WeightBuffer {
 public:
  WeightBuffer() = default;
  explicit WeightBuffer(std::int64_t num_bytes);

  [[nodiscard]] std::byte* data() const { return data_.get(); }
  [[nodiscard]] std::int64_t num_bytes() const { return num_bytes_; }

 private:
  std::shared_ptr<std::byte> data_;  // owns the block
  std::int64_t num_bytes_ = 0;
};

// Scratch of the calling thread, grown to the largest request and kept. The purposes below may be in use at once.
enum class Scratch : int { Inputs, Hidden, Products, Tile, Scores, Routes, Count };
[[nodiscard]] float* scratch_floats(Scratch purpose, std::int64_t count);

}  // namespace tandem::cpu

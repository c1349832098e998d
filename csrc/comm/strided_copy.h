// Copies items between contiguous memory and memory with strides, some bytes at a time, so that a
// long copy does not hold up a thread that has other work.
//
// Plain memory: whoever runs it keeps that alive. Owner: an Operation. One thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace torchft_ext {

// Items in the order of their indices, the last dimension fastest.
struct StridedMemory {
  uint8_t* data = nullptr;
  size_t item = 1;  // bytes
  std::vector<size_t> sizes;
  std::vector<size_t> strides;  // in bytes
};

class StridedCopy {
 public:
  static StridedCopy load(const StridedMemory& from, uint8_t* contiguous);
  static StridedCopy store(uint8_t* contiguous, const StridedMemory& to);

  // Goes on where it stopped, and takes what it copies from *budget (bytes). True: all is copied.
  bool run(size_t* budget);

 private:
  StridedCopy(const StridedMemory& memory, uint8_t* contiguous, bool loads);
  void copy(size_t items) const;
  void toNextRow();

  bool loads_;  // else stores
  uint8_t* contiguous_;
  uint8_t* row_;  // of the strided memory
  size_t item_;
  size_t row_items_ = 1;
  size_t row_stride_;
  size_t column_ = 0;
  bool done_ = false;
  // Of the dimensions outside of a row.
  std::vector<size_t> sizes_;
  std::vector<size_t> strides_;
  std::vector<size_t> at_;
};

// All of them, as far as the budget goes. True: all is copied.
bool runAll(std::vector<StridedCopy>& copies, size_t* budget);

}  // namespace torchft_ext

#include "comm/strided_copy.h"

#include <algorithm>
#include <cstring>

namespace torchft_ext {
namespace {

template <size_t kItem>
void copyItems(uint8_t* to, size_t to_stride, const uint8_t* from, size_t from_stride,
               size_t count) {
  for (size_t i = 0; i < count; ++i) std::memcpy(to + i * to_stride, from + i * from_stride, kItem);
}

// Without dimensions of one item, and with neighbours made one where their items lie as one's do.
void simplify(std::vector<size_t>& sizes, std::vector<size_t>& strides) {
  std::vector<size_t> fewer_sizes;
  std::vector<size_t> fewer_strides;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (sizes[dim] == 1) continue;
    if (!fewer_sizes.empty() && fewer_strides.back() == sizes[dim] * strides[dim]) {
      fewer_sizes.back() *= sizes[dim];
      fewer_strides.back() = strides[dim];
    } else {
      fewer_sizes.push_back(sizes[dim]);
      fewer_strides.push_back(strides[dim]);
    }
  }
  sizes = std::move(fewer_sizes);
  strides = std::move(fewer_strides);
}

}  // namespace

StridedCopy StridedCopy::load(const StridedMemory& from, uint8_t* contiguous) {
  return {from, contiguous, true};
}

StridedCopy StridedCopy::store(uint8_t* contiguous, const StridedMemory& to) {
  return {to, contiguous, false};
}

StridedCopy::StridedCopy(const StridedMemory& memory, uint8_t* contiguous, bool loads)
    : loads_(loads),
      contiguous_(contiguous),
      row_(memory.data),
      item_(memory.item),
      row_stride_(memory.item),
      sizes_(memory.sizes),
      strides_(memory.strides) {
  done_ = std::find(sizes_.begin(), sizes_.end(), size_t{0}) != sizes_.end();
  simplify(sizes_, strides_);
  if (!sizes_.empty()) {
    row_items_ = sizes_.back();
    row_stride_ = strides_.back();
    sizes_.pop_back();
    strides_.pop_back();
  }
  at_.assign(sizes_.size(), 0);
}

bool StridedCopy::run(size_t* budget) {
  while (!done_) {
    if (*budget == 0) return false;
    const size_t items = std::min(row_items_ - column_, std::max<size_t>(1, *budget / item_));
    copy(items);
    contiguous_ += items * item_;
    column_ += items;
    *budget -= std::min(*budget, items * item_);
    if (column_ == row_items_) toNextRow();
  }
  return true;
}

void StridedCopy::copy(size_t items) const {
  uint8_t* const strided = row_ + column_ * row_stride_;
  uint8_t* const to = loads_ ? contiguous_ : strided;
  const uint8_t* const from = loads_ ? strided : contiguous_;
  if (row_stride_ == item_) {
    std::memcpy(to, from, items * item_);
    return;
  }
  const size_t to_stride = loads_ ? item_ : row_stride_;
  const size_t from_stride = loads_ ? row_stride_ : item_;
  switch (item_) {
    case 1:
      return copyItems<1>(to, to_stride, from, from_stride, items);
    case 2:
      return copyItems<2>(to, to_stride, from, from_stride, items);
    case 4:
      return copyItems<4>(to, to_stride, from, from_stride, items);
    case 8:
      return copyItems<8>(to, to_stride, from, from_stride, items);
    default:
      for (size_t i = 0; i < items; ++i)
        std::memcpy(to + i * to_stride, from + i * from_stride, item_);
  }
}

void StridedCopy::toNextRow() {
  column_ = 0;
  for (size_t dim = sizes_.size(); dim-- > 0;) {
    row_ += strides_[dim];
    if (++at_[dim] < sizes_[dim]) return;
    row_ -= sizes_[dim] * strides_[dim];
    at_[dim] = 0;
  }
  done_ = true;
}

bool runAll(std::vector<StridedCopy>& copies, size_t* budget) {
  return std::all_of(copies.begin(), copies.end(),
                     [budget](StridedCopy& copy) { return copy.run(budget); });
}

}  // namespace torchft_ext

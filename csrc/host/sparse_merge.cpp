#include "host/sparse_merge.h"

#include <cstring>

#include "host/reduce.h"

namespace torchft_ext {
namespace {

// What a row costs beside its values, in bytes that a copy would move in that time.
constexpr size_t kCostOfRow = 128;

bool take(size_t* budget, size_t cost) {
  if (*budget == 0) return false;
  *budget -= cost < *budget ? cost : *budget;
  return true;
}

}  // namespace

SparseMerge::SparseMerge(std::vector<SparsePart> parts, std::vector<int64_t> sizes,
                         size_t row_bytes, DType dtype)
    : parts_(std::move(parts)),
      sizes_(std::move(sizes)),
      row_bytes_(row_bytes),
      dtype_(dtype),
      row_in_result_(parts_.size()) {
  for (size_t part = 0; part < parts_.size(); ++part) {
    row_in_result_[part].reserve(parts_[part].rows);
    pushHead(part);
  }
}

uint64_t SparseMerge::keyOf(size_t part, size_t row) const {
  const SparsePart& from = parts_[part];
  uint64_t key = 0;
  for (size_t dim = 0; dim < sizes_.size(); ++dim) {
    key = key * static_cast<uint64_t>(sizes_[dim]) +
          static_cast<uint64_t>(from.indices[dim * from.rows + row]);
  }
  return key;
}

void SparseMerge::pushHead(size_t part) {
  const size_t row = row_in_result_[part].size();
  if (row < parts_[part].rows) heads_.emplace(keyOf(part, row), part);
}

bool SparseMerge::number(size_t* budget) {
  while (!heads_.empty() && unordered_ < 0) {
    if (!take(budget, kCostOfRow)) return false;
    const auto [key, part] = heads_.top();  // of equal keys that of the lowest part
    heads_.pop();
    if (rows_ > 0 && key < last_key_) unordered_ = static_cast<int>(part);
    if (rows_ == 0 || key != last_key_) ++rows_;
    last_key_ = key;
    row_in_result_[part].push_back(rows_ - 1);
    pushHead(part);
  }
  written_.resize(rows_);
  return true;
}

bool SparseMerge::sum(int64_t* indices, uint8_t* values, size_t* budget) {
  for (; summing_.part < parts_.size(); summing_ = {summing_.part + 1, 0}) {
    for (; summing_.row < parts_[summing_.part].rows; ++summing_.row) {
      if (!take(budget, kCostOfRow + row_bytes_)) return false;
      addRow(summing_, indices, values);
    }
  }
  return true;
}

void SparseMerge::addRow(const Cursor& from, int64_t* indices, uint8_t* values) {
  const SparsePart& part = parts_[from.part];
  const size_t row = row_in_result_[from.part][from.row];
  if (row_bytes_ > 0) {
    uint8_t* const into = values + row * row_bytes_;
    const uint8_t* const given = part.values + from.row * row_bytes_;
    if (written_[row]) {
      reduceInto(into, given, row_bytes_, dtype_, ReduceKind::kSum);
    } else {
      std::memcpy(into, given, row_bytes_);
    }
  }
  if (written_[row]) return;
  written_[row] = true;
  for (size_t dim = 0; dim < sizes_.size(); ++dim)
    indices[dim * rows_ + row] = part.indices[dim * part.rows + from.row];
}

}  // namespace torchft_ext

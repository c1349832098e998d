// The sum of sparse rows of several ranks. Each rank gives rows by their indices, in ascending
// order; rows of one index are added in the order of the ranks, so that all ranks that merge the
// same parts get the same bits.
//
// Work is done in pieces, for a thread that has other work. First number(), until all rows of the
// result are counted; then sum(). Memory beside the result: 8 bytes for each row given. Owner:
// whoever merges, who keeps the parts alive; one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <queue>
#include <utility>
#include <vector>

#include "comm/operation.h"

namespace torchft_ext {

// What one rank gives. indices: [sparse dimensions, rows], values: [rows, row_bytes].
struct SparsePart {
  const int64_t* indices = nullptr;
  const uint8_t* values = nullptr;
  size_t rows = 0;
};

class SparseMerge {
 public:
  // sizes: of the sparse dimensions; their product is less than 2^63.
  SparseMerge(std::vector<SparsePart> parts, std::vector<int64_t> sizes, size_t row_bytes,
              DType dtype);

  // True: all rows are counted. What is done is taken from *budget (bytes).
  bool number(size_t* budget);
  size_t rows() const { return rows_; }  // of the result
  // The part whose indices were found out of order while counting; -1: none.
  int unordered() const { return unordered_; }

  // Into [sparse dimensions, rows()] and [rows(), row_bytes]. True: all is written.
  bool sum(int64_t* indices, uint8_t* values, size_t* budget);

 private:
  struct Cursor {
    size_t part = 0;
    size_t row = 0;
  };
  using Head = std::pair<uint64_t, size_t>;  // the key of a part's next row, and the part

  uint64_t keyOf(size_t part, size_t row) const;
  void pushHead(size_t part);
  void addRow(const Cursor& from, int64_t* indices, uint8_t* values);

  const std::vector<SparsePart> parts_;
  const std::vector<int64_t> sizes_;
  const size_t row_bytes_;
  const DType dtype_;
  std::priority_queue<Head, std::vector<Head>, std::greater<>> heads_;
  std::vector<std::vector<size_t>> row_in_result_;  // by part and row: as far as counted
  uint64_t last_key_ = 0;
  size_t rows_ = 0;
  int unordered_ = -1;
  Cursor summing_;
  std::vector<bool> written_;  // rows of the result
};

}  // namespace torchft_ext

// Where an attempt's members meet in the store: the keys under its prefix.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/identity.h"

namespace torchft_ext {

// Of those who look at rank 0's record, as many as are asked one by one whether they have read it.
inline constexpr int kMostReaders = 1024;

class AttemptKeys {
 public:
  AttemptKeys(std::string prefix, int rank, int size)
      : prefix_(std::move(prefix)), rank_(rank), size_(size) {}

  const std::string& prefix() const { return prefix_; }
  std::string own() const { return of(rank_); }
  std::string of(int rank) const { return prefix_ + "/" + std::to_string(rank); }
  std::string go(const Token& token) const { return prefix_ + "/go/" + token.hex(); }

  std::vector<std::string> range(int first, int last) const {
    std::vector<std::string> all;
    for (int rank = first; rank < last; ++rank) all.push_back(of(rank));
    return all;
  }
  std::vector<std::string> everyone() const { return range(0, size_); }
  // Of those who look at this member's record, kMostReaders at most.
  std::vector<std::string> readers() const {
    return rank_ == 0 ? range(1, std::min(size_, kMostReaders)) : range(0, 1);
  }
  int size() const { return size_; }

 private:
  std::string prefix_;
  int rank_;
  int size_;
};

}  // namespace torchft_ext

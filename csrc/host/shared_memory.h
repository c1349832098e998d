// The memory of a generation whose members share a host: one region of each member, which that
// member writes and all read. All lie in one range of this process's addresses.
//
// A region is a memfd. Its owner maps it, and then seals it: no other process can write it, resize
// it, or map it to be written. Who gets a descriptor checks that before it maps it.
//
// Owner: shared by the board and by each thread that works in the memory; the last one unmaps.
// Threads: any; reserve(), mapOwn() and mapPeer() before others use it. A child that is forked does
// not have the mappings, and unmaps nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/unique_fd.h"

namespace torchft_ext {

class SharedMemory {
 public:
  // Addresses for so many regions; null: there are none, and *why.
  static std::shared_ptr<SharedMemory> reserve(int regions, size_t region_bytes, std::string* why);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // Makes this process's region there, zeroed. False: the kernel cannot, or does not allow so much;
  // and *why. Then ownDescriptor() is for the others.
  bool mapOwn(int region, std::string* why);
  int ownDescriptor() const { return own_descriptor_.get(); }
  void closeOwnDescriptor() { own_descriptor_.reset(); }
  // Another member's. False: it is not a region of that size, sealed; and *why.
  bool mapPeer(int region, UniqueFd descriptor, std::string* why);

  // Memory for these bytes of the own region, before they are first used. False: there is none:
  // using them would end the process.
  bool populate(int region, size_t offset, size_t bytes) const;

  uint8_t* at(int region) const { return base_ + static_cast<size_t>(region) * stride_; }
  size_t regionBytes() const { return region_bytes_; }

 private:
  SharedMemory(uint8_t* base, int regions, size_t region_bytes);

  uint8_t* const base_;
  const size_t stride_;
  const size_t bytes_;
  const size_t region_bytes_;
  const uint64_t fork_count_;
  UniqueFd own_descriptor_;
};

}  // namespace torchft_ext

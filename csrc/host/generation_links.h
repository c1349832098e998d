// The links of one generation: one for each lane to every other member, from when they arrive until
// they are closed.
//
// Owner: HostGeneration. Threads: loop only. It never blocks.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "host/link.h"
#include "host/mesh.h"

namespace torchft_ext {

class GenerationLinks {
 public:
  GenerationLinks(int rank, int size) : rank_(rank), lanes_(static_cast<size_t>(size)) {}

  // Null: that lane stands already, and this link is dropped.
  Link* add(int rank, Lane lane, std::shared_ptr<Link> link);
  bool stand(int rank) const;  // all lanes to that member
  bool allStand() const;
  std::vector<Link*> along(Lane lane) const;  // by rank; null: this process, or it has not arrived

  void letGo(Lane lane);
  void close(Lane lane);
  // On every link, as the last that is said there; then they close, after `at_most`.
  void sayLast(const FrameHeader& frame, const std::string& payload, Duration at_most);
  void drop();  // all, closed

  bool everythingSent() const;
  bool everythingRead() const;            // that had come by the last turn
  bool everythingArrived(int but) const;  // the kernels of the others but that one have it
  int count() const;

 private:
  const int rank_;
  std::vector<std::array<std::shared_ptr<Link>, kLanes>> lanes_;  // by rank
};

}  // namespace torchft_ext

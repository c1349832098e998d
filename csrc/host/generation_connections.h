// The connections of one generation: one for each channel to every other member, from when they
// arrive until they are closed.
//
// Owner: HostGeneration. Threads: loop only. It never blocks.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "host/connection.h"
#include "host/mesh.h"

namespace torchft_ext {

class GenerationConnections {
 public:
  GenerationConnections(int rank, int size) : rank_(rank), channels_(static_cast<size_t>(size)) {}

  // Null: that channel stands already, and this connection is dropped.
  Connection* add(int rank, Channel channel, std::shared_ptr<Connection> connection);
  bool stand(int rank) const;  // all channels to that member
  bool allStand() const;
  // by rank; null: this process, or it has not arrived
  std::vector<Connection*> along(Channel channel) const;

  void detachBuffers(Channel channel);
  void close(Channel channel);
  // On every connection, as the last that is said there; then they close, after `at_most`.
  void sayLast(const FrameHeader& frame, const std::string& payload, Duration at_most);
  void drop();  // all, closed

  bool everythingSent() const;
  bool everythingRead() const;            // that had come by the last turn
  bool everythingArrived(int but) const;  // the kernels of the others but that one have it
  int count() const;

 private:
  const int rank_;
  std::vector<std::array<std::shared_ptr<Connection>, kChannels>> channels_;  // by rank
};

}  // namespace torchft_ext

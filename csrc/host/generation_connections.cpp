#include "host/generation_connections.h"

#include <algorithm>
#include <utility>

namespace torchft_ext {

Connection* GenerationConnections::add(int rank, Channel channel,
                                       std::shared_ptr<Connection> connection) {
  auto& place = channels_[static_cast<size_t>(rank)][channel];
  if (place) return nullptr;
  place = std::move(connection);
  return place.get();
}

bool GenerationConnections::stand(int rank) const {
  const auto& connections = channels_[static_cast<size_t>(rank)];
  return std::all_of(connections.begin(), connections.end(),
                     [](const auto& connection) { return connection != nullptr; });
}

bool GenerationConnections::allStand() const {
  for (int other = 0; other < static_cast<int>(channels_.size()); ++other) {
    if (other != rank_ && !stand(other)) return false;
  }
  return true;
}

std::vector<Connection*> GenerationConnections::along(Channel channel) const {
  std::vector<Connection*> found;
  found.reserve(channels_.size());
  for (const auto& connections : channels_) found.push_back(connections[channel].get());
  return found;
}

void GenerationConnections::detachBuffers(Channel channel) {
  for (Connection* connection : along(channel)) {
    if (connection != nullptr) connection->detachBuffers();
  }
}

void GenerationConnections::close(Channel channel) {
  for (Connection* connection : along(channel)) {
    if (connection != nullptr) connection->close();
  }
}

void GenerationConnections::sayLast(const FrameHeader& frame, const std::string& payload,
                                    Duration at_most) {
  for (const auto& connections : channels_) {
    for (const auto& connection : connections) {
      if (!connection) continue;
      connection->sendText(frame, payload);
      connection->closeAfterTexts(at_most);
    }
  }
}

void GenerationConnections::drop() {
  for (const Channel channel : {kControl, kCollective}) close(channel);
  for (auto& connections : channels_) {
    for (auto& connection : connections) connection.reset();
  }
}

bool GenerationConnections::everythingSent() const {
  return std::all_of(channels_.begin(), channels_.end(), [](const auto& connections) {
    return std::all_of(connections.begin(), connections.end(), [](const auto& connection) {
      return !connection || connection->sendQueueEmpty();
    });
  });
}

bool GenerationConnections::everythingRead() const {
  return std::none_of(channels_.begin(), channels_.end(), [](const auto& connections) {
    return std::any_of(connections.begin(), connections.end(), [](const auto& connection) {
      return connection && connection->hasMoreToRead();
    });
  });
}

bool GenerationConnections::everythingArrived(int but) const {
  for (int other = 0; other < static_cast<int>(channels_.size()); ++other) {
    const auto& connections = channels_[static_cast<size_t>(other)];
    const auto arrived = [](const auto& connection) {
      return !connection || connection->everythingArrived();
    };
    if (other != but && !std::all_of(connections.begin(), connections.end(), arrived)) return false;
  }
  return true;
}

int GenerationConnections::count() const {
  int count = 0;
  for (const auto& connections : channels_) {
    for (const auto& connection : connections) count += connection ? 1 : 0;
  }
  return count;
}

}  // namespace torchft_ext

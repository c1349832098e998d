#include "host/generation_links.h"

#include <algorithm>
#include <utility>

namespace torchft_ext {

Link* GenerationLinks::add(int rank, Lane lane, std::shared_ptr<Link> link) {
  auto& place = lanes_[static_cast<size_t>(rank)][lane];
  if (place) return nullptr;
  place = std::move(link);
  return place.get();
}

bool GenerationLinks::stand(int rank) const {
  const auto& links = lanes_[static_cast<size_t>(rank)];
  return std::all_of(links.begin(), links.end(), [](const auto& link) { return link != nullptr; });
}

bool GenerationLinks::allStand() const {
  for (int other = 0; other < static_cast<int>(lanes_.size()); ++other) {
    if (other != rank_ && !stand(other)) return false;
  }
  return true;
}

std::vector<Link*> GenerationLinks::along(Lane lane) const {
  std::vector<Link*> found;
  found.reserve(lanes_.size());
  for (const auto& links : lanes_) found.push_back(links[lane].get());
  return found;
}

void GenerationLinks::letGo(Lane lane) {
  for (Link* link : along(lane)) {
    if (link != nullptr) link->letGo();
  }
}

void GenerationLinks::close(Lane lane) {
  for (Link* link : along(lane)) {
    if (link != nullptr) link->close();
  }
}

void GenerationLinks::sayLast(const FrameHeader& frame, const std::string& payload,
                              Duration at_most) {
  for (const auto& links : lanes_) {
    for (const auto& link : links) {
      if (!link) continue;
      link->sendText(frame, payload);
      link->closeAfterTexts(at_most);
    }
  }
}

void GenerationLinks::drop() {
  for (const Lane lane : {kControl, kCollective}) close(lane);
  for (auto& links : lanes_) {
    for (auto& link : links) link.reset();
  }
}

bool GenerationLinks::everythingSent() const {
  return std::all_of(lanes_.begin(), lanes_.end(), [](const auto& links) {
    return std::all_of(links.begin(), links.end(),
                       [](const auto& link) { return !link || link->sendQueueEmpty(); });
  });
}

bool GenerationLinks::everythingRead() const {
  return std::none_of(lanes_.begin(), lanes_.end(), [](const auto& links) {
    return std::any_of(links.begin(), links.end(),
                       [](const auto& link) { return link && link->hasMoreToRead(); });
  });
}

bool GenerationLinks::everythingArrived(int but) const {
  for (int other = 0; other < static_cast<int>(lanes_.size()); ++other) {
    const auto& links = lanes_[static_cast<size_t>(other)];
    const auto arrived = [](const auto& link) { return !link || link->everythingArrived(); };
    if (other != but && !std::all_of(links.begin(), links.end(), arrived)) return false;
  }
  return true;
}

int GenerationLinks::count() const {
  int count = 0;
  for (const auto& links : lanes_) {
    for (const auto& link : links) count += link ? 1 : 0;
  }
  return count;
}

}  // namespace torchft_ext

#include "cpp/elastic/elastic_world_links.h"

namespace torchft_ext {

void ElasticWorldLinks::send(const Way& way, MessagePtr message) {
  const auto [link, fresh] = links_.try_emplace(way);
  if (fresh) {
    link->second.at = busy_.size();
    busy_.push_back(way);
  }
  link->second.messages.push_back(std::move(message));
}

ElasticWorldLinks::MessagePtr ElasticWorldLinks::takeFirst(const Way& way) {
  auto& messages = links_.at(way).messages;
  auto message = std::move(messages.front());
  messages.erase(messages.begin());
  if (messages.empty()) drop(way);
  return message;
}

void ElasticWorldLinks::drop(const Way& way) {
  const auto link = links_.find(way);
  if (link == links_.end()) return;
  const size_t at = link->second.at;
  links_.erase(link);
  if (at + 1 < busy_.size()) {
    busy_[at] = busy_.back();
    links_.at(busy_[at]).at = at;
  }
  busy_.pop_back();
}

std::vector<ElasticWorldLinks::Way> ElasticWorldLinks::ascending() const {
  std::vector<Way> ways;
  ways.reserve(links_.size());
  for (const auto& [way, link] : links_) ways.push_back(way);
  return ways;
}

void ElasticWorldLinks::write(ByteWriter& writer) const {
  for (const auto& [way, link] : links_) {
    writer.u8(static_cast<uint8_t>(way.first));
    writer.u8(static_cast<uint8_t>(way.second));
    writer.u8(static_cast<uint8_t>(link.messages.size()));
    for (const auto& message : link.messages) writer.text(encodeElasticMessage(*message));
  }
}

}  // namespace torchft_ext

// The messages of an ElasticWorld that are on their way. A value.
#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "elastic/elastic_message.h"
#include "net/frame.h"

namespace torchft_ext {

class ElasticWorldLinks {
 public:
  using Way = std::pair<int, int>;  // from one member to another
  using MessagePtr = std::shared_ptr<const ElasticMessage>;

  void send(const Way& way, MessagePtr message);
  MessagePtr takeFirst(const Way& way);
  // What is on this way is lost.
  void drop(const Way& way);

  // The ways that carry something: in an order of no meaning, so that one is drawn at once; and
  // ascending.
  const std::vector<Way>& busy() const { return busy_; }
  std::vector<Way> ascending() const;
  const Way& first() const { return links_.begin()->first; }

  void write(ByteWriter& writer) const;  // the same where two are equal

 private:
  struct Link {
    std::vector<MessagePtr> messages;  // in order; there are some
    size_t at = 0;                     // in busy_
  };
  std::map<Way, Link> links_;
  std::vector<Way> busy_;
};

}  // namespace torchft_ext

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

  // Those that carry something: in the order in which a value may be taken out at random, and
  // ascending.
  const std::vector<Way>& busy() const { return busy_; }
  std::vector<Way> ascending() const;

  void write(ByteWriter& writer) const;  // equal where the values are

 private:
  struct Link {
    std::vector<MessagePtr> messages;  // in order; there are some
    size_t at = 0;                     // in busy_
  };
  std::map<Way, Link> links_;
  std::vector<Way> busy_;
};

}  // namespace torchft_ext

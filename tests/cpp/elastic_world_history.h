// What has happened in the first lineage of an ElasticWorld, which nothing later may contradict:
// its views, and what their agreements have returned. A value.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "elastic/view.h"
#include "net/frame.h"

namespace torchft_ext {

class ElasticWorldHistory {
 public:
  explicit ElasticWorldHistory(const View& first) { adopt(first); }

  // Members are named by their index.
  void adopt(View view);
  void sayNo(int member, uint64_t view, uint64_t index);
  void returnFrom(int member, const Outcome& outcome);
  // Does all of it fit together? Only what is new makes a difference.
  void check();

  const std::map<uint64_t, View>& views() const { return views_; }  // by number
  const View& newest() const { return views_.rbegin()->second; }
  void fail(const std::string& what);
  const std::string& wrong() const { return wrong_; }  // empty: nothing is

  void write(ByteWriter& writer) const;  // equal where the values are

 private:
  using Key = std::pair<uint64_t, uint64_t>;  // view, index
  void checkOk(const Key& key);

  std::map<uint64_t, View> views_;        // as adopted anywhere
  std::map<Key, Answer> returned_;        // by whoever returned from it
  std::map<Key, std::set<int>> said_no_;  // who voted no
  std::map<Key, std::set<int>> returned_by_;
  bool has_news_ = false;
  std::string wrong_;
};

}  // namespace torchft_ext

// What has happened in an ElasticWorld, which nothing later may contradict: the views of its
// lineages, and what their agreements have returned. A value.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cpp/elastic/elastic_world_members.h"
#include "elastic/view.h"
#include "net/frame.h"

namespace torchft_ext {

class ElasticWorldHistory {
 public:
  using ViewKey = std::pair<LineageNumber, uint64_t>;

  explicit ElasticWorldHistory(const View& first) { adopt(first); }

  // Members are named by their index.
  void adopt(View view);
  // A view whose missing members were called absent, and nothing else: were enough ready?
  void checkLeftOut(const View& view);
  void sayNo(int member, const ViewKey& view, uint64_t index);
  void sayDigest(int member, const ViewKey& view, uint64_t index, const VoteDigest& digest);
  void returnFrom(int member, LineageNumber lineage, const Outcome& outcome);
  // Does all of it fit together? Only what is new makes a difference.
  void check();

  static ViewKey keyOf(const View& view) { return {numberOf(view.lineage), view.number}; }
  const std::map<ViewKey, View>& views() const { return views_; }
  const View& newestOf(LineageNumber lineage) const;
  void fail(const std::string& what);
  const std::string& wrong() const { return wrong_; }  // empty: nothing is

  void write(ByteWriter& writer) const;  // the same where two are equal

 private:
  using Key = std::pair<ViewKey, uint64_t>;  // view, index

  void checkOk(const Key& key);
  // Two members whose digests must not differ and do, of those in all of these views; -1: none.
  std::pair<int, int> divergedIn(const Key& key, const std::vector<const View*>& views) const;
  void checkNext(const Key& key, const View& next);

  std::map<ViewKey, View> views_;                     // as adopted anywhere
  std::map<Key, Answer> returned_;                    // by whoever returned from it
  std::map<Key, std::set<int>> said_no_;              // who voted no
  std::map<Key, std::map<int, VoteDigest>> digests_;  // not empty ones
  std::map<Key, std::set<int>> returned_by_;
  bool has_news_ = false;
  std::string wrong_;
};

}  // namespace torchft_ext

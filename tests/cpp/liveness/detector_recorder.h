// The orders of a Detector under test, written down.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "liveness/detector.h"

namespace torchft_ext {

inline constexpr milliseconds kLimit{300};
inline const std::string kHost = "here";
inline constexpr int64_t kPid = 77;

inline Incarnation peerNumber(int number) {
  Incarnation id;
  id.bytes[0] = static_cast<uint8_t>(number);
  return id;
}

inline WatchedPeer member(int number, bool backup = false) {
  return {number, peerNumber(number), "there", 1000 + number, backup};
}

struct DetectorProbe {
  Incarnation peer;
  LivenessKind kind;
  ProbeOrder order;
};

class Recorder : public DetectorOrders {
 public:
  void fail(WatchId watch, Failure failure) override {
    EXPECT_TRUE(failures.emplace(watch, std::move(failure)).second) << "told twice: " << watch;
  }
  void left(WatchId watch, const Incarnation& peer, int) override {
    EXPECT_TRUE(leavers.emplace(watch, peer).second);
  }
  void wantConnection(WatchId watch, const Incarnation& peer, LivenessKind kind) override {
    EXPECT_TRUE(wanted.emplace(watch, peer, kind).second);
  }
  void unwantConnection(WatchId watch, const Incarnation& peer, LivenessKind kind) override {
    EXPECT_EQ(wanted.erase({watch, peer, kind}), 1U);
  }
  void probe(const Incarnation& peer, LivenessKind kind, const ProbeOrder& order) override {
    probes.push_back({peer, kind, order});
  }
  void askOthers(const Incarnation& peer) override { asked.push_back(peer); }
  void accuse(const Incarnation& peer, const std::string&) override { accused.push_back(peer); }
  void warn(const std::string& text) override { warnings.push_back(text); }
  std::string processState(const std::string& host, int64_t) override {
    return host == "there" ? "state T: stopped by a signal" : "";
  }

  // Of the last probe of that connection; 0: there was none.
  uint64_t lastProbeOf(const Incarnation& peer, LivenessKind kind) const {
    const auto found = std::find_if(probes.rbegin(), probes.rend(), [&](const auto& probe) {
      return probe.peer == peer && probe.kind == kind;
    });
    return found == probes.rend() ? 0 : found->order.number;
  }

  std::map<WatchId, Failure> failures;
  std::set<std::tuple<WatchId, Incarnation, LivenessKind>> wanted;
  std::set<std::pair<WatchId, Incarnation>> leavers;
  std::vector<DetectorProbe> probes;
  std::vector<Incarnation> asked;
  std::vector<Incarnation> accused;
  std::vector<std::string> warnings;
};

}  // namespace torchft_ext

// Sees to it that the outcome of one generation, which is over here, reaches every member that may
// count on this process for it.
//
// A member of the generation is
//   untold    its connection stays wanted. It was sent the outcome over the connection that stood,
//               if one did: that connection may have been closed at its far end. Whenever a
//               connection to it comes up it is told again, and asked what it knows
//   settled   it has told its own outcome, as every member does on all its connections once it
//               knows; or its process has ended
//   absent    it left before it was known to know: so it may have told nobody, and a second later
//               (members that leave together cost nobody a connection) the ring closes around it.
//               Who is a neighbour of this process without it is untold
// Neighbours are those of the overlay of the members present (liveness/overlay.h). When nobody is
// untold, all neighbours know and see to the rest; after kKeptFor it gives up. An outcome that is
// no failure, a member's leaving, counts as told when it is sent: nobody waits for it.
//
// Owner: FailurePropagation, one for each generation that is over and not retired. Threads: its
// owner's. Pure: no clock, never blocks.
#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/identity.h"
#include "liveness/notice.h"

namespace torchft_ext {

class BroadcastOrders {
 public:
  virtual ~BroadcastOrders() = default;
  // false: no connection stands
  virtual bool send(const Incarnation& to, const Notice& notice) = 0;
  // Once each, besides what the detector wants for the same watch.
  virtual void keepConnection(uint64_t watch, const Incarnation& peer) = 0;
  virtual void dropConnection(uint64_t watch, const Incarnation& peer) = 0;
};

class OutcomeBroadcast {
 public:
  using Time = Clock::time_point;
  static constexpr std::chrono::seconds kKeptFor{30};
  static constexpr std::chrono::seconds kCloseAfter{1};

  OutcomeBroadcast(BroadcastOrders& orders, uint64_t watch, int self_rank, Notice outcome);

  // Tells each member; then the ring closes around those that have left before.
  void begin(Time now, const std::vector<std::pair<int, Incarnation>>& members,
             const std::set<Incarnation>& neighbours, const std::set<Incarnation>& settled);
  // The detector wants its connection no more. True: it is kept.
  bool keep(const Incarnation& peer);

  void connectionUp(const Incarnation& peer);
  void connectionEnded(const Incarnation& peer) { asked_.erase(peer); }
  void settle(const Incarnation& peer);
  void left(Time now, int rank);
  void left(Time now, const Incarnation& peer);  // or it has ended, and may have left before
  void tick(Time now);
  std::optional<Time> nextDue() const;  // nullopt: it is done

  bool isDone() const { return untold_.empty() && !close_at_; }

 private:
  bool isFailure() const { return outcome_.type == Notice::Type::kFailed; }
  void closeRanks();
  void release(const Incarnation& peer);

  BroadcastOrders& orders_;
  const uint64_t watch_;
  const int self_rank_;
  const Notice outcome_;
  Time give_up_at_;
  std::optional<Time> close_at_;
  std::map<int, Incarnation> present_;
  std::set<Incarnation> settled_;
  std::set<Incarnation> untold_;
  std::set<Incarnation> asked_;  // over the connection that stands
  std::set<Incarnation> kept_;   // connections that the detector does not want
};

}  // namespace torchft_ext

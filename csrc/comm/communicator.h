// The live connections of one generation, as the policy above sees every engine.
//
// Owner: the group's current generation, alone; retired to its destructor, which never blocks. Rank
// and size never change. Failing the lifecycle is the one way to end it early: the engine
// subscribes to it.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "comm/op_state.h"
#include "membership/member_prober.h"
#include "membership/rendezvous.h"

namespace torchft_ext {

class Communicator {
 public:
  virtual ~Communicator() = default;  // marks, cuts, hands over; never waits

  // Any thread; never blocks. Operations of one communicator run in the order of issue, except send
  // and recv, which hold up nothing and are held up by nothing. The state is completed when the
  // engine is out of its buffers. Arguments have been checked. Once the lifecycle is over:
  // completed with its failure, no buffer touched.
  virtual void issue(std::shared_ptr<OpState> state, Operation operation) = 0;

  struct Issue {
    std::shared_ptr<OpState> state;
    Operation operation;
  };
  // Operations that begin as one: a coalesced group, a batch of sends and receives. In this order
  // where the engine cannot do better.
  virtual void issueTogether(std::vector<Issue> issues) {
    for (Issue& one : issues) issue(std::move(one.state), std::move(one.operation));
  }

  // Waits until everything issued before this call is complete, successfully or not. False: not by
  // the deadline. Engines whose Works block their caller need nothing here.
  virtual bool awaitIssued(Deadline /*deadline*/) { return true; }

  // After the lifecycle failed: waits until no engine thread is inside a user buffer and every
  // operation is completed. False: not by the deadline. Where it returns true, and where the
  // deadline had expired at the call, what the calling thread enqueues on its current streams from
  // then on comes behind whatever operations of this generation may still do to memory. Any thread;
  // the engine's own does not wait and gets true.
  virtual bool drain(Deadline deadline) = 0;

  // Says goodbye after everything issued has been sent, and ends the lifecycle. False: not by the
  // deadline.
  virtual bool leave(Deadline deadline) = 0;
  // The same, to begin another generation: a member that still needs this one is told so
  // (kAborted), and one that does not completes what it has begun. False: something issued here is
  // not complete, or was not sent by the deadline, or the engine cannot: fail the lifecycle
  // instead.
  virtual bool leaveForAnother(Deadline /*deadline*/) { return false; }

  virtual uint64_t bytesSent() const = 0;
  virtual uint64_t bytesReceived() const = 0;
  // By rank: how long operations here have waited for each member alone or with others, of the
  // waits for which members were asked. Empty: the engine does not know. Any thread.
  virtual std::vector<Duration> waitedFor() const { return {}; }
  // Why collectives on host memory do not run in shared memory. Empty: they do, or there is nothing
  // to choose. Any thread.
  virtual std::string whyOverSockets() const { return {}; }
};

// Makes communicators. Owner: the groups that use it; host engines are kept by the process too.
// Threads: any.
class Engine {
 public:
  virtual ~Engine() = default;
  virtual const char* name() const = 0;
  // The engine of another member of this process (comm/member_claims.h), with the same options;
  // member 0's is what this process has as a rule. Whoever holds it keeps that member alive. Null:
  // this engine serves every member. Failure: no port, no thread.
  virtual std::variant<std::shared_ptr<Engine>, Failure> forMember(int /*member*/) {
    return std::shared_ptr<Engine>();
  }
  // Named counters for stats(): "connections_accepted",
  // "connections_refused", "monitor_connections", ...
  virtual std::vector<std::pair<std::string, int64_t>> counters() const = 0;

  // Where this process's members can be reached, for its record. Opens the listener at first use.
  virtual std::variant<MemberRecord, Failure> describeSelf() = 0;
  // For an attempt of a world of that size: asks such addresses as describeSelf() gives. Null:
  // none.
  virtual std::unique_ptr<MemberProber> makeMemberProber(int size) = 0;
  // A member that does not run for so long may be left out by the others. Zero: never.
  virtual Duration frozenAfter() const = 0;

  // One attempt to connect to the roster's members and to pass a barrier over the connections;
  // blocks until done (the lifecycle may have failed since), until the lifecycle is over, the
  // deadline, or `superseded` returns true (polled about every 20 ms, on this thread): then
  // std::monostate, and the attempt has left nothing behind.
  virtual std::variant<std::shared_ptr<Communicator>, Failure, std::monostate> form(
      const Roster& roster, std::shared_ptr<Lifecycle> lifecycle, Deadline deadline,
      const std::function<bool()>& superseded) = 0;
};

}  // namespace torchft_ext

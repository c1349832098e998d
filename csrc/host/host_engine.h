// The CPU engine: one network thread, one listener and one peer monitor, for each set of network
// options (interface, ports, local sockets, heartbeat); shared by all groups that have the same.
//
// Owner: groups share it; the process-wide registry keeps it until processExit(), but those of
// members beyond the first. Threads: any.
#pragma once

#include <memory>
#include <string>
#include <variant>

#include "comm/communicator.h"
#include "host/schedule.h"
#include "host/shared_plans.h"
#include "net/socket_address.h"

namespace torchft_ext {

struct HostEngineOptions {
  SocketAddress bind_address;  // where to listen and what to publish; the port is ignored
  PortRange ports;
  bool local_sockets = true;  // beside TCP, for peers of this host
  bool shared_memory = true;  // for collectives of members that all run on one host
  Duration heartbeat_limit = std::chrono::seconds(5);  // 0: off
  ScheduleTuning tuning;
  SharedPlanTable plans;  // equal on all members that share memory

  std::string key() const;  // equal: may share one engine
};

// The engine for these options; made at first use. Failure: no port, no thread. It is that of the
// process's member 0; forMember() gives those of other members. They are there only while somebody
// holds them: with the last one the member ends, in the background, and its peers are told. Each
// life of such a member has an incarnation of its own, one for all options.
std::variant<std::shared_ptr<Engine>, Failure> hostEngine(const HostEngineOptions& options);
// A separate one, for tests that play several processes in one: it serves every member, with an
// incarnation drawn anew for it.
std::variant<std::shared_ptr<Engine>, Failure> makeHostEngineForTest(
    const HostEngineOptions& options);
// Shuts down the socket of its main liveness connection to that process, as a broken network would.
// Any thread.
void cutConnectionForTest(Engine& engine, const Incarnation& peer);
// Keeps its threads, the monitor's too, from everything else for so long. Any thread.
void holdUpForTest(Engine& engine, Duration how_long);
// Ends threads of all engines, by the deadline. After it hostEngine() starts afresh.
bool stopHostEngines(Deadline deadline);

}  // namespace torchft_ext

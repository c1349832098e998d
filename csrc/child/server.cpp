#include "child/server.h"

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>

#include "child/operation_of.h"
#include "host/host_engine.h"
#include "host/network_limits.h"
#include "host/process.h"
#include "host/shared_environment.h"

namespace torchft_ext::child {
namespace {

constexpr milliseconds kGoodbyeLimit{500};  // the parent waits a second
constexpr milliseconds kEndLimit{200};

std::variant<std::shared_ptr<Engine>, std::string> engineFor(const Configure& told,
                                                             ServedEngine& served) {
  HostEngineOptions options;
  const auto address = SocketAddress::fromNumeric(told.address, 0);
  if (!address) return "expected the address to listen on, found '" + told.address + "'";
  options.bind_address = *address;
  const auto ports = portRangeOf(told.ports);
  if (const auto* problem = std::get_if<std::string>(&ports)) return "port_range" + *problem;
  options.ports = std::get<PortRange>(ports);
  options.local_sockets = told.local_sockets;
  const milliseconds heartbeat(told.heartbeat_ms);
  const std::string problem = heartbeatProblem(heartbeat);
  if (!problem.empty()) return "heartbeat" + problem;
  options.heartbeat_limit = heartbeat;
  const std::string of_environment = useSharedEnvironment(&options);
  if (!of_environment.empty()) return of_environment;
  return served.make([&options] { return hostEngine(options); });
}

// What another rank's limit ended has failed: its parent tells whose it was.
RequestEnd endOf(const FailurePtr& failure, int rank) {
  if (!failure) return RequestEnd::kGood;
  const bool late = failure->kind == FailureKind::kTimeout && failure->cause.rank == rank;
  return late ? RequestEnd::kTimedOut : RequestEnd::kFailed;
}

}  // namespace

Server::Server(std::shared_ptr<Channel> channel, ServedEngine& engine)
    : channel_(std::move(channel)),
      engine_(engine),
      store_(std::make_shared<ParentStore>(channel_)) {}

Server::~Server() {
  if (configuring_.running() && !configuring_.join(Deadline::after(kEndLimit)))
    configuring_.abandon("its parent does not wait for it any more");
}

void Server::serve() {
  channel_->send(helloFrame());
  while (const auto frame = channel_->receive()) {
    if (frame->kind == Kind::kQuit) return leave();
    heard(*frame);
  }
}

void Server::heard(const Channel::Frame& frame) {
  switch (frame.kind) {
    case Kind::kConfigure:
      return configure(parseConfigure(frame.payload));
    case Kind::kIssue:
      return issue(parseIssue(frame.payload));
    case Kind::kStoreReply:
      return store_->answer(parseParentsAnswer(frame.payload));
    default:
      return engine_.heard(frame.kind, frame.payload);
  }
}

void Server::configure(const Configure& told) {
  if (group_) throw ProtocolError("a second configure");
  const auto made = engineFor(told, engine_);
  if (const auto* problem = std::get_if<std::string>(&made))
    return channel_->send(configuredFrame(RequestEnd::kFailed, *problem));
  const milliseconds limit(told.limit_ms);
  group_ = std::make_shared<Group>(told.name, std::get<std::shared_ptr<Engine>>(made),
                                   sharedWatchdog(), limit);
  group_->leaveWarningsToOwner();  // its parent may have ended the other members' children itself
  rememberGroup(group_);
  rank_ = told.rank;
  size_ = told.size;
  const auto thread = StoreThread::forServer("parent", store_->factory());
  configuring_ = OwnedThread("ft-configure", [channel = channel_, group = group_, thread, told] {
    const FailurePtr failure = group->configure(thread, "child", told.rank, told.size);
    channel->send(configuredFrame(failure ? RequestEnd::kFailed : RequestEnd::kGood,
                                  failure ? failure->describe() : std::string()));
  });
}

void Server::issue(const Issue& issue) {
  if (!group_) throw ProtocolError("an operation before configure");
  auto made = operationOf(issue, engine_, rank_, size_);
  if (const auto* problem = std::get_if<std::string>(&made)) return refuse(issue, *problem);
  engine_.place(std::get<Operation>(made), issue);
  std::shared_ptr<OpState> state;
  try {
    state = group_->issue(std::get<Operation>(std::move(made)));
  } catch (const std::invalid_argument& problem) {  // of an engine that does not do everything
    return refuse(issue, problem.what());
  }
  state->onDoneAtOnce([channel = channel_, number = issue.number, rank = rank_, state] {
    const FailurePtr failure = state->failure();
    const int source = failure ? failure->cause.rank : state->sourceRank();
    channel->send(doneFrame(number, endOf(failure, rank), source,
                            failure ? failure->describe() : std::string()));
  });
}

void Server::refuse(const Issue& issue, const std::string& problem) {
  channel_->send(doneFrame(issue.number, RequestEnd::kRefused, -1, problem));
}

void Server::leave() {
  if (group_) group_->shutdown(Deadline::after(kGoodbyeLimit));
}

}  // namespace torchft_ext::child

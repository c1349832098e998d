#include "c10d/group/failed_init.h"

#include <unistd.h>

#include <algorithm>
#include <optional>
#include <system_error>

#include "base/host_name.h"
#include "base/log.h"
#include "c10d/store/store_adapter.h"
#include "comm/op_state.h"
#include "membership/rendezvous.h"

namespace torchft_ext {
namespace {

// The store's server may wait for a name server, 5 s a try, while others connect to it.
constexpr Duration kStoreAnswersWithin = std::chrono::seconds(15);

MemberRecord absentSelf() {
  MemberRecord self;
  self.incarnation = Incarnation::random();  // other members of this process may wait for it
  self.token = Token::random();
  self.host = hostName();
  self.pid = ::getpid();
  return self;
}

std::optional<StorePlace> placeIfAny(const c10::intrusive_ptr<c10d::Store>& store) {
  try {
    try {
      return storePlaceOf(store);
    } catch (const std::system_error&) {  // that no thread is left may be what is to be told
      return storePlaceWithoutThread(store);
    }
  } catch (const std::exception& error) {
    log(LogLevel::kWarning,
        std::string("the other ranks cannot be told that this one does not come: ") + error.what());
    return std::nullopt;
  }
}

}  // namespace

void publishFailedInit(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       Duration limit, const std::string& why) {
  if (size <= 1) return;
  const std::optional<StorePlace> place = placeIfAny(store);
  if (!place) return;
  const MemberRecord self = absentSelf();
  Failure failure;
  failure.kind = FailureKind::kRendezvous;
  failure.cause = {rank, -1, self.host, self.pid, "it could not make its group: " + why};
  const Cancelled interrupted = [] {
    runWaitHook();
    return false;
  };
  const Deadline deadline = Deadline::after(std::min(limit, kStoreAnswersWithin));
  Rendezvous absent(place->thread, place->prefix, rank, size, self, deadline, interrupted);
  absent.publishFailedInit(failure);
}

}  // namespace torchft_ext

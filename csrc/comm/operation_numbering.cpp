#include "comm/operation_numbering.h"

#include <optional>
#include <string>

#include "comm/callback_path.h"

namespace torchft_ext {

std::shared_ptr<OpState> OperationNumbering::stateOf(Operation& operation,
                                                     const std::shared_ptr<Lifecycle>& lifecycle) {
  // Operations on devices stand in their streams' order; sends and receives are matched by tag.
  const bool can_be_named = !operation.device && isCollective(operation.kind);
  CallbackScope* const scope = can_be_named ? CallbackScope::present() : nullptr;
  const uint64_t place = placeOf(lifecycle->identity().group, lifecycle->identity().generation);
  std::optional<CallbackPath> path;
  if (scope != nullptr) path = scope->next(place);
  if (path) {
    operation.name = path->nameIn(place);
    operation.described = inCallbackOf(toString(operation.kind), *path);
    return std::make_shared<OpState>(lifecycle, operation.kind, OpState::kNoSeq, operation.timeout,
                                     path);
  }
  operation.in_nameless_callback = scope != nullptr;
  const int64_t seq = next_seq_++;
  const uint64_t order = can_be_named ? collectives_ : kNoPlace;
  if (can_be_named)
    path = CallbackPath::ofCollective(place, collectives_++, toString(operation.kind), seq);
  auto state = std::make_shared<OpState>(lifecycle, operation.kind, seq, operation.timeout, path);
  state->setPlace(order);
  return state;
}

}  // namespace torchft_ext

#include "c10d/group/group_making.h"

#include <new>
#include <system_error>
#include <utility>
#include <variant>

#include "c10d/group/engines.h"
#include "c10d/group/failed_init.h"
#include "c10d/store/store_adapter.h"
#include "c10d/work/comm_error.h"

namespace torchft_ext {
namespace {

// A backend, and where its members meet.
struct Made {
  c10::intrusive_ptr<FtBackend> backend;
  StorePlace place;
};

std::variant<Made, Failure> make(const GroupSpec& spec) {
  if (!spec.options->staged && spec.backend_name == "gloo") spec.options->staged = true;
  auto choice = engineOrFailure(spec.engine, *spec.options, spec.store, spec.bound_device);
  if (auto* failure = std::get_if<Failure>(&choice)) return std::move(*failure);
  Made made;
  made.backend = c10::make_intrusive<FtBackend>(spec, std::get<EngineChoice>(std::move(choice)));
  if (spec.begin) made.place = storePlaceOf(spec.store);
  return made;
}

// Where this rank cannot make it, the others wait for it: they are told why it does not come,
// without advice that is this rank's.
Made makeOrTellAbsence(const GroupSpec& spec) {
  const auto tell = [&spec](const std::string& why) {
    if (!spec.begin) return;
    publishFailedInit(spec.store, spec.rank, spec.size, durationOf(spec.chosenTimeout()), why);
  };
  auto made = [&] {
    try {
      return make(spec);
    } catch (const c10::Error& error) {
      tell(error.what_without_backtrace());
      throw;
    } catch (const std::system_error& error) {
      tell(error.what());
      throw;
    } catch (const std::bad_alloc&) {
      tell("it ran out of memory");
      throw;
    }  // nobody is told of a signal or of a look-up without an answer: that would take long, too
  }();
  if (const auto* failure = std::get_if<Failure>(&made)) {
    tell(failure->cause.how);
    throwFailure(std::make_shared<Failure>(*failure));
  }
  return std::get<Made>(std::move(made));
}

}  // namespace

c10::intrusive_ptr<FtBackend> makeBackend(const GroupSpec& spec) {
  TORCH_CHECK_VALUE(spec.store, spec.caller, ": store: expected a store, found none");
  checkSize({spec.caller, "world_size"}, spec.size);
  checkRank({spec.caller, "rank"}, spec.rank, spec.size);
  auto [backend, place] = makeOrTellAbsence(spec);
  if (!spec.begin) return backend;
  if (spec.beside) {
    backend->expectMembersOf(*spec.beside, spec.ranks_beside);
    backend->group().setJob(spec.beside->group().job().beside(spec.by_rule));
  }
  backend->form({place.thread, place.prefix}, spec.rank, spec.size, std::nullopt);
  return backend;
}

ProcessGroupPtr makeGroup(const GroupSpec& spec) {
  const auto backend = makeBackend(spec);
  auto group = c10::make_intrusive<FtProcessGroup>(spec.store, backend, backend->devices().types());
  group->setGroupName(spec.name);
  return group;
}

}  // namespace torchft_ext

// Bad input from C++: what is thrown is what Python programs get, as refusals/refusals.py shows, in
// which the same cases have the same names.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <future>
#include <map>
#include <regex>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "cpp/support/captured_log.h"
#include "cpp/support/processes.h"
#include "cpp/support/wait_for.h"
#include "libtorch/group_backend.h"
#include "torchft_ext/torch/process_group.h"

namespace torchft_ext {
namespace {

using Cases = std::vector<std::pair<std::string, std::function<void()>>>;
using Answers = std::map<std::string, std::string>;  // by case: "type: text"

constexpr std::chrono::milliseconds kNone{0};
const char* const kNowhere = "127.0.0.1:1/x";

ProcessGroupPtr made(int rank, int size, GroupOptions options = {}) {
  options.engine = "host";
  return makeGroup(c10::make_intrusive<c10d::HashStore>(), rank, size, options);
}

std::vector<at::Tensor> ones() {
  return {at::ones({3})};
}

Cases casesOfMaking() {
  return {{"null store", [] { makeGroup({}, 0, 1); }},
          {"rank beyond", [] { made(1, 1); }},
          {"rank below", [] { made(-1, 1); }},
          {"size of none", [] { made(0, 0); }},
          {"limit of none", [] { made(0, 1, {.timeout = kNone}); }}};
}

Cases casesOfMembership(const ProcessGroupPtr& group) {
  return {
      {"no address", [=] { configure(group, "no address", 0, 1); }},
      {"configure rank beyond", [=] { configure(group, kNowhere, 2, 2); }},
      {"configure rank below", [=] { configure(group, kNowhere, -1, 2); }},
      {"configure size of none", [=] { configure(group, kNowhere, 0, 0); }},
      {"configure limit of none", [=] { configure(group, kNowhere, 0, 1, kNone); }},
      {"limit below", [=] { setTimeout(group, std::chrono::milliseconds(-1)); }},
      {"split of strangers",
       [=] {
         split(group, {0, 5});
       }},
  };
}

// Those of the other configure(), which Python does not have.
Cases casesOfMembershipOverAStore(const ProcessGroupPtr& group) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  return {
      {"configure rank beyond", [=] { configure(group, store, 2, 2); }},
      {"configure rank below", [=] { configure(group, store, -1, 2); }},
      {"configure size of none", [=] { configure(group, store, 0, 0); }},
      {"configure limit of none", [=] { configure(group, store, 0, 1, kNone); }},
  };
}

Cases casesOfTensors(const ProcessGroupPtr& group) {
  const auto backend = backendIn(group);
  return {{"another device",
           [=] {
             std::vector<at::Tensor> tensors{at::ones({3}, at::kMeta)};
             backend->allreduce(tensors, {});
           }},
          {"no tensor",
           [=] {
             std::vector<at::Tensor> tensors;
             backend->allreduce(tensors, {});
           }},
          {"sparse",
           [=] {
             std::vector<std::vector<at::Tensor>> outputs{ones()};
             std::vector<at::Tensor> inputs{at::ones({3}).to_sparse()};
             backend->allgather(outputs, inputs, {});
           }},
          {"root beyond",
           [=] {
             auto tensors = ones();
             c10d::BroadcastOptions options;
             options.rootRank = 1;
             group->broadcast(tensors, options);
           }},
          {"bits of floats",
           [=] {
             auto tensors = ones();
             c10d::AllreduceOptions options;
             options.reduceOp = c10d::ReduceOp::BAND;
             group->allreduce(tensors, options);
           }},
          {"peer beyond", [=] {
             auto tensors = ones();
             group->send(tensors, 1, 0);
           }}};
}

Cases casesOfUse(const ProcessGroupPtr& group) {
  return {{"allreduce",
           [=] {
             auto tensors = ones();
             group->allreduce(tensors)->wait();
           }},
          {"barrier", [=] { group->barrier()->wait(); }},
          {"check", [=] { check(group); }},
          {"errored", [=] { errored(group); }},
          {"abort", [=] { abort(group, "again"); }},
          {"stats", [=] { stats(group); }},
          {"split", [=] { split(group, {0}); }},
          {"configure", [=] { configure(group, kNowhere, 0, 1); }},
          {"shutdown", [=] { shutdown(group); }}};
}

// As Python names the exception and the arguments, without what differs between two runs.
std::string inWordsOfPython(const std::string& answer) {
  std::string text = answer;
  for (const auto& [cpp, python] :
       std::map<std::string, std::string>{{"makeGroup: ", "make_group: "},
                                          {"setTimeout: ", "set_timeout: "},
                                          {"configure: size: ", "configure: world_size: "},
                                          {"found null", "found None"},
                                          {"in process [0-9]+", "in process N"},
                                          {"[0-9.]+ s into", "S s into"}}) {
    text = std::regex_replace(text, std::regex(cpp), python);
  }
  return text;
}

std::string answerTo(const std::function<void()>& call) {
  try {
    call();
    return "nothing";
  } catch (const CommAbortedError& error) {
    return "CommAbortedError: " + error.failure().describe();
  } catch (const c10::ValueError& error) {
    return std::string("ValueError: ") + error.what_without_backtrace();
  } catch (const c10::TypeError& error) {
    return std::string("TypeError: ") + error.what_without_backtrace();
  } catch (const c10::Error& error) {
    return std::string("RuntimeError: ") + error.what_without_backtrace();
  } catch (const std::logic_error& error) {
    return std::string("RuntimeError: ") + error.what();
  }
}

Answers answersTo(const Cases& cases, const std::string& when = "") {
  Answers answers;
  for (const auto& [name, call] : cases) answers[when + name] = inWordsOfPython(answerTo(call));
  return answers;
}

Answers read(const std::string& path) {
  std::ifstream file(path);
  Answers answers;
  for (std::string line; std::getline(file, line);) {
    const size_t tab = line.find('\t');
    answers[line.substr(0, tab)] = inWordsOfPython(line.substr(tab + 1));
  }
  return answers;
}

struct File {
  explicit File(const char* name)
      : path(::testing::TempDir() + "refusals_" + name + std::to_string(::getpid())) {}
  ~File() { std::filesystem::remove(path); }
  const std::string path;
};

Answers answersOfAChild(const ProcessGroupPtr& group) {
  const File file("child");
  const pid_t child = ::fork();
  if (child == 0) {
    std::ofstream lines(file.path);
    for (const auto& [name, answer] : answersTo(casesOfUse(group), "child: ")) {
      lines << name << '\t' << answer << std::endl;
    }
    ::_exit(0);
  }
  ::waitpid(child, nullptr, 0);
  return read(file.path);
}

Answers ofCpp() {
  Answers all = answersTo(casesOfMaking());
  const ProcessGroupPtr group = made(0, 1, {.name = "alone"});
  all.merge(answersTo(casesOfMembership(group)));
  all.merge(answersTo(casesOfTensors(group)));
  all.merge(answersOfAChild(group));
  EXPECT_EQ(answerTo(casesOfUse(group)[0].second), "nothing");  // it goes on after all of that
  abort(group, "enough");
  all.merge(answersTo({casesOfUse(group)[0]}, "aborted: "));
  shutdown(group);
  all.merge(answersTo(casesOfUse(group), "shut down: "));
  return all;
}

TEST(Refusals, BadInputIsRefusedAndTheGroupGoesOn) {
  const Answers answers = ofCpp();
  EXPECT_EQ(answers.size(), 37U);
  for (const auto& [name, answer] : answers) {
    const bool harmless = name == "shut down: errored" || name == "shut down: abort" ||
                          name == "shut down: stats" || name == "shut down: shutdown";
    EXPECT_EQ(answer == "nothing", harmless) << name << ": " << answer;
  }
  for (const char* name : {"shut down: split", "shut down: configure"}) {
    EXPECT_NE(answers.at(name).find("make a new group"), std::string::npos) << answers.at(name);
  }
}

TEST(Refusals, BothWaysToConfigureRefuseAlike) {
  const ProcessGroupPtr group = made(0, 1);
  Answers by_address = answersTo(casesOfMembership(group));
  for (const auto& [name, answer] : answersTo(casesOfMembershipOverAStore(group))) {
    EXPECT_EQ(answer, by_address.at(name)) << name;
  }
  EXPECT_EQ(answerTo([&] { configure(group, StorePtr(), 0, 1); }),
            "ValueError: configure: store: expected a store, found null");
  shutdown(group);
}

#ifdef TFT_PYTHON
TEST(Refusals, AreThoseOfPython) {
  const File file("python");
  Processes python;
  python.start({TFT_PYTHON, TFT_REFUSALS_PY, file.path});
  ASSERT_TRUE(python.endWell(Deadline::after(std::chrono::seconds(180))));
  const Answers pythons = read(file.path);
  const Answers ours = ofCpp();
  EXPECT_EQ(ours.size(), pythons.size());
  for (const auto& [name, answer] : ours) EXPECT_EQ(answer, pythons.at(name)) << name;
}
#endif

// ---- exceptions in callbacks

TEST(CallbackExceptions, OfAFailuresListenerAreLoggedAndTheNextFailureIsTold) {
  const CapturedLog log;
  const ProcessGroupPtr group = made(0, 1);
  std::promise<void> again;
  int calls = 0;
  onFailure(group, [&](const FailurePtr&) {
    if (++calls == 1) throw std::runtime_error("the listener's own");
    again.set_value();
  });
  abort(group);
  EXPECT_TRUE(waitFor([] { return CapturedLog::contains("the listener's own"); }));
  configure(group, c10::make_intrusive<c10d::HashStore>(), 0, 1);
  abort(group);
  again.get_future().get();
  shutdown(group);
}

TEST(CallbackExceptions, OfAFutureStayInTheFutureThatThenReturned) {
  const ProcessGroupPtr group = made(0, 1);
  auto tensors = ones();
  const auto work = group->allreduce(tensors);
  const auto next = work->getFuture()->then(
      [](c10::ivalue::Future&) -> c10::IValue { throw std::runtime_error("the callback's own"); },
      c10::NoneType::get());
  next->wait();
  ASSERT_TRUE(next->hasError());
  EXPECT_NE(next->tryRetrieveErrorMessage().find("the callback's own"), std::string::npos);
  work->wait();
  EXPECT_EQ(answerTo(casesOfUse(group)[0].second), "nothing");
  EXPECT_EQ(errored(group), nullptr);
  shutdown(group);
}

}  // namespace
}  // namespace torchft_ext

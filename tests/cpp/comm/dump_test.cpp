// What dumps look like, and how they are written.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "comm/callbacks.h"
#include "comm/dump_files.h"
#include "comm/dump_writer.h"
#include "comm/operation_dump.h"
#include "cpp/support/wait_for.h"

namespace torchft_ext {
namespace {

namespace fs = std::filesystem;

void writeAllKinds(DumpWriter& writer) {
  writer.beginDict();
  writer.key("a");
  writer.beginList();
  writer.number(-2);
  writer.text("\"\n\xc3\xa4\xff");
  writer.endList();
  writer.key("b");
  writer.boolean(true);
  writer.key("c");
  writer.null();
  writer.endDict();
}

TEST(DumpWriter, JsonIsSeparatedAndEscaped) {
  JsonWriter writer;
  writeAllKinds(writer);
  EXPECT_EQ(writer.finish(), "{\"a\": [-2, \"\\\"\\u000a\xc3\xa4?\"], \"b\": true, \"c\": null}\n");
}

TEST(DumpWriter, APickleHasPythonsCodes) {
  PickleWriter writer;
  writeAllKinds(writer);
  const std::string expected = std::string("\x80\x02(X\x01\0\0\0a(\x8a\x08", 12) + '\xfe' +
                               std::string(7, '\xff') +
                               std::string("X\x05\0\0\0\"\n\xc3\xa4?l", 11) +
                               std::string("X\x01\0\0\0b\x88X\x01\0\0\0cNd.", 16);
  EXPECT_EQ(writer.finish(), expected);
}

class DumpFiles : public testing::Test {
 protected:
  DumpFiles() : folder_(fs::temp_directory_path() / ("ft_dumps_" + std::to_string(::getpid()))) {
    fs::create_directories(folder_);
  }
  ~DumpFiles() override { fs::remove_all(folder_); }

  std::string prefix() const { return (folder_ / "rank_").string(); }
  // Counts what the process has asked for.
  void dump(const std::shared_ptr<OperationRecorder>& recorder, int64_t generation) const {
    ++asked;
    dumpFailedGeneration(recorder, generation, prefix());
  }
  size_t files() const {
    return static_cast<size_t>(
        std::distance(fs::directory_iterator(folder_), fs::directory_iterator()));
  }
  static std::string textOf(const fs::path& path) {
    std::stringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
  }

  inline static int asked = 0;
  const fs::path folder_;
};

std::shared_ptr<OperationRecorder> recorderOf(int64_t generation) {
  auto recorder = std::make_shared<OperationRecorder>("dp \"0\"", 10);
  GenerationRecord record;
  record.number = generation;
  record.id = "0123abcd";
  record.rank = 1;
  record.size = 2;
  record.members = {{"here", 11}, {"there", 12}};
  recorder->begin(std::move(record));
  Operation barrier;
  recorder->issued(barrier, generation, 1, Clock::now());
  return recorder;
}

FailurePtr timeout() {
  auto failure = std::make_shared<Failure>();
  failure->kind = FailureKind::kTimeout;
  return failure;
}

TEST_F(DumpFiles, HaveRankGenerationAndIdInTheirNames) {
  const auto recorder = recorderOf(7);
  recorder->failed(7, timeout());
  dump(recorder, 7);
  EXPECT_TRUE(waitFor([&] { return fs::exists(prefix() + "1.generation7_0123abcd.1.json"); }));
  EXPECT_TRUE(fs::exists(prefix() + "1.generation7_0123abcd_1"));
  const std::string text = textOf(prefix() + "1.generation7_0123abcd.1.json");
  EXPECT_NE(text.find("\"name\": \"dp \\\"0\\\"/0123abcd\""), std::string::npos) << text;
  EXPECT_NE(text.find("\"state\": \"failed\""), std::string::npos) << text;
}

TEST_F(DumpFiles, AreNotWrittenWithoutAPrefix) {
  const auto recorder = recorderOf(1);
  dumpFailedGeneration(recorder, 1, "");
  dump(recorder, 1);
  EXPECT_TRUE(waitFor([&] { return files() == 2; }));
  EXPECT_FALSE(fs::exists("1.generation1_0123abcd_1"));
}

TEST_F(DumpFiles, AreSoManyInAProcessAndNoMore) {
  const auto left = static_cast<size_t>(kMostFailureDumps - asked);
  for (int64_t generation = 1; generation <= kMostFailureDumps + 5; ++generation)
    dump(recorderOf(generation), generation);
  std::atomic<bool> done{false};
  EXPECT_TRUE(waitFor([&] { return files() == 2 * left; })) << files();
  runOnCallbackThread([&done] { done = true; });
  EXPECT_TRUE(waitFor([&done] { return done.load(); }));
  EXPECT_EQ(files(), 2 * left);
}

TEST_F(DumpFiles, OnDemandHaveWhatLivesInTheProcess) {
  const auto recorder = recorderOf(3);
  rememberRecorder(recorder);
  rememberRecorder(recorderOf(4));  // gone at once
  recorder->waitedFor(1, {0});
  const std::string path = (folder_ / "now.json").string();
  ASSERT_EQ(dumpEverything(path), 0);
  EXPECT_NE(textOf(path).find("\"waited_for\": [0]"), std::string::npos);
  ASSERT_EQ(waitsOfProcess().size(), 1u);
  EXPECT_TRUE(waitsOfProcess()[0].starts_with("barrier #1 on 'dp \"0\"' has waited"));
  EXPECT_NE(textOf(path).find("\"generation\": 3,"), std::string::npos);
  EXPECT_EQ(textOf(path).find("\"generation\": 4,"), std::string::npos);
  EXPECT_EQ(files(), 1u) << "nothing is left beside it";
}

TEST_F(DumpFiles, ThatCannotBeWrittenAreAnError) {
  EXPECT_EQ(dumpEverything((folder_ / "missing" / "now").string()), ENOENT);
  fs::create_directory(folder_ / "taken");
  EXPECT_EQ(dumpEverything((folder_ / "taken").string()), EISDIR);
  EXPECT_EQ(files(), 1u) << "nothing is left beside it";
}

}  // namespace
}  // namespace torchft_ext

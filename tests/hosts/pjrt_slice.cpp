// A PJRT plugin by which N processes of one machine are the hosts of one slice, on CPU, for tests.
//
// Each process loads a real CPU plugin with the devices of all, and says that only its own are addressable. When a
// program is run, the processes exchange the arguments of their own devices, run the whole program on all devices, and
// keep the results of their own. As on a slice, all have to run the same programs in the same order: where one runs
// another, all abort and name both; where one is gone, the others wait for it for ever.
//
// Environment: SLICE_PLUGIN (the real plugin), SLICE_HOST (index of this process), SLICE_HOSTS ("0,0,1,1": the host of
// each device), SLICE_SOCKET (path of a unix socket).

#include <dlfcn.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "pjrt_c_api.h"

namespace {

using Buffers = std::vector<PJRT_Buffer*>;

const PJRT_Api* real;
PJRT_Api api;
int this_host, num_hosts;
std::vector<int> host_of_device;
// Of host 0, to the others by their index; of another host, the one to host 0.
std::vector<int> sockets;
// One program at a time, in the order of the calls.
std::mutex running;
PJRT_Client* client;
std::vector<PJRT_Device*> devices;
std::vector<PJRT_Memory*> memories;
std::unordered_map<PJRT_LoadedExecutable*, std::vector<PJRT_Device*>> devices_of;

template <typename T>
T arguments() {
  T made;
  memset(&made, 0, sizeof made);
  made.struct_size = sizeof made;
  return made;
}

#define RETURN_ERROR(call) \
  if (PJRT_Error* error = (call)) return error

[[noreturn]] void fail(const std::string& what) {
  fprintf(stderr, "host %d: %s\n", this_host, what.c_str());
  abort();
}

// ---- Between processes ----

void write_all(int socket, const void* data, size_t size) {
  for (auto at = static_cast<const char*>(data); size;) {
    ssize_t written = send(socket, at, size, MSG_NOSIGNAL);
    // The other is gone.
    while (written <= 0) pause();
    at += written, size -= written;
  }
}

void read_all(int socket, void* data, size_t size) {
  for (auto at = static_cast<char*>(data); size;) {
    ssize_t got = read(socket, at, size);
    while (got <= 0) pause();
    at += got, size -= got;
  }
}

void write_string(int socket, const std::string& text) {
  size_t size = text.size();
  write_all(socket, &size, sizeof size);
  write_all(socket, text.data(), size);
}

std::string read_string(int socket) {
  size_t size;
  read_all(socket, &size, sizeof size);
  std::string text(size, 0);
  read_all(socket, text.data(), size);
  return text;
}

void join_slice() {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  strncpy(address.sun_path, getenv("SLICE_SOCKET"), sizeof address.sun_path - 1);
  auto place = reinterpret_cast<sockaddr*>(&address);
  if (this_host == 0) {
    sockets.assign(num_hosts, -1);
    int listening = socket(AF_UNIX, SOCK_STREAM, 0);
    if (bind(listening, place, sizeof address) || listen(listening, num_hosts)) fail("cannot listen");
    for (int joined = 1; joined < num_hosts; joined++) {
      int other = accept(listening, nullptr, nullptr), index;
      read_all(other, &index, sizeof index);
      sockets[index] = other;
    }
    close(listening);
    return;
  }
  for (int attempt = 0; attempt < 1200; attempt++, usleep(100000)) {
    int other = socket(AF_UNIX, SOCK_STREAM, 0);
    if (!connect(other, place, sizeof address)) {
      write_all(other, &this_host, sizeof this_host);
      sockets = {other};
      return;
    }
    close(other);
  }
  fail("cannot join");
}

std::vector<std::string> exchange(const std::string& mine) {
  std::vector<std::string> all(num_hosts);
  if (this_host == 0) {
    all[0] = mine;
    for (int host = 1; host < num_hosts; host++) all[host] = read_string(sockets[host]);
    for (int host = 1; host < num_hosts; host++)
      for (auto& text : all) write_string(sockets[host], text);
  } else {
    write_string(sockets[0], mine);
    for (auto& text : all) text = read_string(sockets[0]);
  }
  return all;
}

// ---- Which devices are addressable ----

int id_of(PJRT_DeviceDescription* description) {
  auto asked = arguments<PJRT_DeviceDescription_Id_Args>();
  asked.device_description = description;
  if (real->PJRT_DeviceDescription_Id(&asked)) fail("a device has no id");
  return asked.id;
}

int host_of(PJRT_Device* device) {
  auto asked = arguments<PJRT_Device_GetDescription_Args>();
  asked.device = device;
  if (real->PJRT_Device_GetDescription(&asked)) fail("a device has no description");
  return host_of_device.at(id_of(asked.device_description));
}

bool is_own(PJRT_Device* device) { return host_of(device) == this_host; }

PJRT_Error* create_client(PJRT_Client_Create_Args* given) {
  auto option = arguments<PJRT_NamedValue>();
  option.name = "cpu_device_count";
  option.name_size = strlen(option.name);
  option.type = PJRT_NamedValue_kInt64;
  option.int64_value = host_of_device.size();
  option.value_size = 1;
  auto created = arguments<PJRT_Client_Create_Args>();
  created.create_options = &option;
  created.num_options = 1;
  RETURN_ERROR(real->PJRT_Client_Create(&created));
  given->client = client = created.client;

  auto listed = arguments<PJRT_Client_Devices_Args>();
  listed.client = client;
  RETURN_ERROR(real->PJRT_Client_Devices(&listed));
  std::copy_if(listed.devices, listed.devices + listed.num_devices, std::back_inserter(devices), is_own);

  auto found = arguments<PJRT_Client_AddressableMemories_Args>();
  found.client = client;
  RETURN_ERROR(real->PJRT_Client_AddressableMemories(&found));
  for (size_t i = 0; i < found.num_addressable_memories; i++) {
    auto asked = arguments<PJRT_Memory_AddressableByDevices_Args>();
    asked.memory = found.addressable_memories[i];
    RETURN_ERROR(real->PJRT_Memory_AddressableByDevices(&asked));
    if (asked.num_devices && is_own(asked.devices[0])) memories.push_back(asked.memory);
  }
  join_slice();
  return nullptr;
}

PJRT_Error* process_index(PJRT_Client_ProcessIndex_Args* given) {
  given->process_index = this_host;
  return nullptr;
}

PJRT_Error* addressable_devices(PJRT_Client_AddressableDevices_Args* given) {
  given->addressable_devices = devices.data();
  given->num_addressable_devices = devices.size();
  return nullptr;
}

PJRT_Error* addressable_memories(PJRT_Client_AddressableMemories_Args* given) {
  given->addressable_memories = memories.data();
  given->num_addressable_memories = memories.size();
  return nullptr;
}

PJRT_Error* process_of_device(PJRT_DeviceDescription_ProcessIndex_Args* given) {
  given->process_index = host_of_device.at(id_of(given->device_description));
  return nullptr;
}

PJRT_Error* is_addressable(PJRT_Device_IsAddressable_Args* given) {
  given->is_addressable = is_own(given->device);
  return nullptr;
}

PJRT_Error* devices_of_program(PJRT_LoadedExecutable_AddressableDevices_Args* given) {
  RETURN_ERROR(real->PJRT_LoadedExecutable_AddressableDevices(given));
  std::lock_guard<std::mutex> lock(running);
  auto& own = devices_of[given->executable];
  own.clear();
  auto all = given->addressable_devices;
  std::copy_if(all, all + given->num_addressable_devices, std::back_inserter(own), is_own);
  given->addressable_devices = own.data();
  given->num_addressable_devices = own.size();
  return nullptr;
}

// ---- Running a program ----

struct Argument {
  PJRT_Buffer_Type type;
  std::vector<int64_t> shape;
};

PJRT_Error* await(PJRT_Event* event) {
  if (!event) return nullptr;
  auto waited = arguments<PJRT_Event_Await_Args>();
  waited.event = event;
  PJRT_Error* failed = real->PJRT_Event_Await(&waited);
  auto dropped = arguments<PJRT_Event_Destroy_Args>();
  dropped.event = event;
  real->PJRT_Event_Destroy(&dropped);
  return failed;
}

void drop(PJRT_Buffer* buffer) {
  if (!buffer) return;
  auto dropped = arguments<PJRT_Buffer_Destroy_Args>();
  dropped.buffer = buffer;
  real->PJRT_Buffer_Destroy(&dropped);
}

PJRT_Error* describe_program(PJRT_LoadedExecutable* program, std::string& name, size_t& num_outputs) {
  auto got = arguments<PJRT_LoadedExecutable_GetExecutable_Args>();
  got.loaded_executable = program;
  RETURN_ERROR(real->PJRT_LoadedExecutable_GetExecutable(&got));
  auto named = arguments<PJRT_Executable_Name_Args>();
  named.executable = got.executable;
  RETURN_ERROR(real->PJRT_Executable_Name(&named));
  name.assign(named.executable_name, named.executable_name_size);
  auto counted = arguments<PJRT_Executable_NumOutputs_Args>();
  counted.executable = got.executable;
  RETURN_ERROR(real->PJRT_Executable_NumOutputs(&counted));
  num_outputs = counted.num_outputs;
  auto dropped = arguments<PJRT_Executable_Destroy_Args>();
  dropped.executable = got.executable;
  return real->PJRT_Executable_Destroy(&dropped);
}

PJRT_Error* describe_argument(PJRT_Buffer* buffer, Argument& argument) {
  auto typed = arguments<PJRT_Buffer_ElementType_Args>();
  typed.buffer = buffer;
  RETURN_ERROR(real->PJRT_Buffer_ElementType(&typed));
  argument.type = typed.type;
  auto shaped = arguments<PJRT_Buffer_Dimensions_Args>();
  shaped.buffer = buffer;
  RETURN_ERROR(real->PJRT_Buffer_Dimensions(&shaped));
  argument.shape.assign(shaped.dims, shaped.dims + shaped.num_dims);
  return nullptr;
}

PJRT_Error* append_bytes(PJRT_Buffer* buffer, std::string& bytes) {
  auto copied = arguments<PJRT_Buffer_ToHostBuffer_Args>();
  copied.src = buffer;
  RETURN_ERROR(real->PJRT_Buffer_ToHostBuffer(&copied));
  size_t size = copied.dst_size, at = bytes.size() + sizeof size;
  bytes.append(reinterpret_cast<char*>(&size), sizeof size);
  bytes.resize(at + size);
  copied.dst = &bytes[at];
  RETURN_ERROR(real->PJRT_Buffer_ToHostBuffer(&copied));
  return await(copied.event);
}

PJRT_Error* make_buffer(const char* bytes, const Argument& argument, PJRT_Device* device, PJRT_Buffer*& made) {
  auto sent = arguments<PJRT_Client_BufferFromHostBuffer_Args>();
  sent.client = client;
  sent.data = bytes;
  sent.type = argument.type;
  sent.dims = argument.shape.data();
  sent.num_dims = argument.shape.size();
  sent.host_buffer_semantics = PJRT_HostBufferSemantics_kImmutableOnlyDuringCall;
  sent.device = device;
  RETURN_ERROR(real->PJRT_Client_BufferFromHostBuffer(&sent));
  made = sent.buffer;
  return await(sent.done_with_host_buffer);
}

PJRT_Error* execute(PJRT_LoadedExecutable_Execute_Args* given) {
  std::string name;
  size_t num_outputs;
  RETURN_ERROR(describe_program(given->executable, name, num_outputs));
  auto listed = arguments<PJRT_LoadedExecutable_AddressableDevices_Args>();
  listed.executable = given->executable;
  RETURN_ERROR(real->PJRT_LoadedExecutable_AddressableDevices(&listed));
  size_t num_devices = listed.num_addressable_devices;
  std::lock_guard<std::mutex> lock(running);

  // Which program it is, then the arguments of the devices of this host.
  std::string head = name + ", " + std::to_string(num_outputs) + " outputs, arguments ", bytes;
  std::vector<Argument> described(given->num_args);
  for (size_t i = 0; i < given->num_args; i++) {
    RETURN_ERROR(describe_argument(given->argument_lists[0][i], described[i]));
    head += std::to_string(described[i].type);
    for (auto size : described[i].shape) head += "," + std::to_string(size);
    head += "; ";
  }
  for (size_t own = 0; own < given->num_devices; own++)
    for (size_t i = 0; i < given->num_args; i++) RETURN_ERROR(append_bytes(given->argument_lists[own][i], bytes));
  auto heads = exchange(head), of_hosts = exchange(bytes);
  for (int host = 0; host < num_hosts; host++)
    if (heads[host] != head) fail("hosts run different programs\n  here: " + head + "\n  there: " + heads[host]);

  // All devices of the program: those of others with arguments made of their bytes.
  std::vector<const char*> at(num_hosts);
  for (int host = 0; host < num_hosts; host++) at[host] = of_hosts[host].data();
  std::vector<Buffers> inputs(num_devices, Buffers(given->num_args)), outputs(num_devices, Buffers(num_outputs));
  std::vector<int> place(num_devices, -1);
  Buffers made;
  int own = 0;
  for (size_t device = 0; device < num_devices; device++) {
    int host = host_of(listed.addressable_devices[device]);
    if (host == this_host) {
      std::copy_n(given->argument_lists[own], given->num_args, inputs[device].begin());
      std::copy_n(given->output_lists[own], num_outputs, outputs[device].begin());
      place[device] = own++;
      continue;
    }
    for (size_t i = 0; i < given->num_args; i++) {
      size_t size;
      memcpy(&size, at[host], sizeof size);
      at[host] += sizeof size;
      RETURN_ERROR(make_buffer(at[host], described[i], listed.addressable_devices[device], inputs[device][i]));
      made.push_back(inputs[device][i]);
      at[host] += size;
    }
  }
  std::vector<PJRT_Buffer* const*> input_lists;
  std::vector<PJRT_Buffer**> output_lists;
  for (auto& list : inputs) input_lists.push_back(list.data());
  for (auto& list : outputs) output_lists.push_back(list.data());
  std::vector<PJRT_Event*> finished(num_devices, nullptr);
  auto options = arguments<PJRT_ExecuteOptions>();
  memcpy(&options, given->options, std::min(given->options->struct_size, sizeof options));
  options.struct_size = sizeof options;
  auto run = arguments<PJRT_LoadedExecutable_Execute_Args>();
  run.executable = given->executable;
  run.options = &options;
  run.argument_lists = input_lists.data();
  run.num_devices = num_devices;
  run.num_args = given->num_args;
  run.output_lists = output_lists.data();
  run.device_complete_events = finished.data();
  PJRT_Error* failed = real->PJRT_LoadedExecutable_Execute(&run);
  for (size_t device = 0; device < num_devices && !failed; device++) {
    if (place[device] >= 0) {
      std::copy_n(outputs[device].begin(), num_outputs, given->output_lists[place[device]]);
      if (given->device_complete_events) {
        given->device_complete_events[place[device]] = finished[device];
      } else {
        await(finished[device]);
      }
    } else {
      failed = await(finished[device]);
      for (auto buffer : outputs[device]) drop(buffer);
    }
  }
  for (auto buffer : made) drop(buffer);
  return failed;
}

const char* variable(const char* name) {
  const char* value = getenv(name);
  if (!value) fail(std::string(name) + " is not set");
  return value;
}

}  // namespace

extern "C" const PJRT_Api* GetPjrtApi() {
  if (real) return &api;
  this_host = atoi(variable("SLICE_HOST"));
  for (auto at = variable("SLICE_HOSTS"); *at; at += *at == ',') {
    host_of_device.push_back(strtol(at, const_cast<char**>(&at), 10));
    num_hosts = std::max(num_hosts, host_of_device.back() + 1);
  }
  void* library = dlopen(variable("SLICE_PLUGIN"), RTLD_NOW | RTLD_LOCAL);
  if (!library) fail(dlerror());
  real = reinterpret_cast<const PJRT_Api* (*)()>(dlsym(library, "GetPjrtApi"))();
  memset(&api, 0, sizeof api);
  memcpy(&api, real, std::min(real->struct_size, sizeof api));
  api.PJRT_Client_Create = create_client;
  api.PJRT_Client_ProcessIndex = process_index;
  api.PJRT_Client_AddressableDevices = addressable_devices;
  api.PJRT_Client_AddressableMemories = addressable_memories;
  api.PJRT_DeviceDescription_ProcessIndex = process_of_device;
  api.PJRT_Device_IsAddressable = is_addressable;
  api.PJRT_LoadedExecutable_AddressableDevices = devices_of_program;
  api.PJRT_LoadedExecutable_Execute = execute;
  return &api;
}

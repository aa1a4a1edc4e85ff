// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * Traffic whose both ends are this one process, so that no scheduler is in
 * what it costs and a run repeats to the digit.
 *
 *   load [-m MARK] [-n NODE] …                NODE is n0, the one behind n1 …
 *   load [-m MARK] udp SIZE COUNT FLOWS       n0 to n1
 *   load [-m MARK] tcp BYTES                  n0 to n1
 *   load [-m MARK] trips COUNT                one byte to and fro over TCP
 *   load [-m MARK] peers SIZE COUNT PEERS     n0 to n1, n2, … in turn
 *   load [-m MARK] multicast SIZE COUNT MEMBERS
 *   load [-m MARK] cold PEERS                 a first datagram to each of them
 *   load link ROUNDS                          n1's ib0 down and up
 *
 * Node i is the namespace ni with the address 10.0.0.(i+1) on ib0. -m has the
 * emulator note its counts as MARK and MARK + 1, see tools/count.c. A line of
 * JSON tells of what lies between the marks.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#include <netinet/in.h>
#include <netinet/tcp.h>

#define MAX_NODES 80
#define BATCH 16
#define PORT 5400
#define PATIENCE 20000 /* milliseconds */
#define WARM_UP 64 /* of this many packets one is sent before */

static unsigned char buffer[1 << 18];
static int mark;
static int nodes = 2;
static int first;

static void fail(const char *what)
{
	fprintf(stderr, "load: %s: %s\n", what, strerror(errno));
	exit(1);
}

static int check(int value, const char *what)
{
	if (value < 0)
		fail(what);
	return value;
}

static void enter(int node)
{
	char path[64];
	int fd;

	snprintf(path, sizeof(path), "/run/netns/n%d", first + node);
	fd = check(open(path, O_RDONLY), path);
	check(setns(fd, CLONE_NEWNET), "setns");
	close(fd);
}

static struct sockaddr_in address_of(int node)
{
	return (struct sockaddr_in){
		.sin_family = AF_INET,
		.sin_port = htons(PORT),
		.sin_addr.s_addr = htonl(0x0a000001 + first + node),
	};
}

static int open_socket(int node, int type)
{
	int size = 8 << 20, one = 1, fd;

	enter(node);
	fd = check(socket(AF_INET, type, 0), "socket");
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (type == SOCK_DGRAM) {
		setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &size, sizeof(size));
		setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &size, sizeof(size));
	}
	return fd;
}

static int bound(int node, int type, int port)
{
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons(port) };
	int fd = open_socket(node, type);

	check(bind(fd, (struct sockaddr *)&at, sizeof(at)), "bind");
	return fd;
}

static unsigned long long now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000000000ull + time.tv_nsec;
}

/* What the interfaces and IP have counted, of all nodes together. */
struct seen {
	unsigned long long rx_packets, tx_packets, ip_receives;
};

static struct seen look(void)
{
	struct seen all = { 0 };
	char line[1024], *at;

	for (int node = 0; node < nodes; node++) {
		unsigned long long rx = 0, tx = 0, ip = 0;
		FILE *file;

		enter(node);
		file = fopen("/proc/thread-self/net/dev", "r");
		while (file && fgets(line, sizeof(line), file)) {
			at = strstr(line, "ib0:");
			if (at)
				sscanf(at + 4, "%*u %llu %*u %*u %*u %*u %*u %*u %*u %llu",
				       &rx, &tx);
		}
		if (!file || fclose(file))
			fail("/proc/net/dev");
		file = fopen("/proc/thread-self/net/snmp", "r");
		while (file && fgets(line, sizeof(line), file))
			sscanf(line, "Ip: %*u %*u %llu", &ip);
		if (!file || fclose(file))
			fail("/proc/net/snmp");
		all.rx_packets += rx;
		all.tx_packets += tx;
		all.ip_receives += ip;
	}
	return all;
}

static void set_mark(int number)
{
	static unsigned char *code;
	const unsigned char nop[] = { 0x0f, 0x1f, 0x80, number, 0x4f, 0x50, 0x49, 0xc3 };

	if (!number)
		return;
	if (!code) {
		code = mmap(NULL, 4096, PROT_READ | PROT_WRITE | PROT_EXEC,
			    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (code == MAP_FAILED)
			fail("mmap");
	}
	/* A place of its own for each, as translated code is kept. */
	memcpy(code + 8 * (number % 256), nop, sizeof(nop));
	((void (*)(void))(code + 8 * (number % 256)))();
}

static struct seen before;
static unsigned long long started;

static void begin(void)
{
	before = look();
	set_mark(mark);
	started = now();
}

static void end(unsigned long long sent, unsigned long long received, unsigned long long bytes)
{
	unsigned long long nanoseconds = now() - started;
	struct seen after;

	set_mark(mark ? mark + 1 : 0);
	after = look();
	printf("{\"sent\": %llu, \"received\": %llu, \"bytes\": %llu, ", sent, received, bytes);
	printf("\"nanoseconds\": %llu, ", nanoseconds);
	printf("\"rx_packets\": %llu, ", after.rx_packets - before.rx_packets);
	printf("\"tx_packets\": %llu, ", after.tx_packets - before.tx_packets);
	printf("\"ip_receives\": %llu}\n", after.ip_receives - before.ip_receives);
}

/* Whether a socket becomes readable in time. */
static int readable(int fd, int patience)
{
	struct pollfd wait = { .fd = fd, .events = POLLIN };

	return check(poll(&wait, 1, patience), "poll") > 0;
}

static struct mmsghdr message(struct iovec *piece)
{
	return (struct mmsghdr){ .msg_hdr = { .msg_iov = piece, .msg_iovlen = 1 } };
}

/* Takes up to `count` datagrams, and waits for those that are missing. */
static int drain(int fd, int count, int patience)
{
	static unsigned char sink[64][64];
	struct mmsghdr messages[64];
	struct iovec pieces[64];
	int taken = 0, got;

	for (int i = 0; i < count; i++) {
		pieces[i] = (struct iovec){ sink[i], sizeof(sink[i]) };
		messages[i] = message(&pieces[i]);
	}
	while (taken < count) {
		got = recvmmsg(fd, messages + taken, count - taken, MSG_DONTWAIT, NULL);
		if (got > 0)
			taken += got;
		else if (!patience || !readable(fd, patience))
			break;
	}
	return taken;
}

static int group_socket(int node)
{
	struct ip_mreqn member = { .imr_multiaddr.s_addr = inet_addr("239.9.9.9") };
	int fd = bound(node, SOCK_DGRAM, PORT);

	member.imr_ifindex = if_nametoindex("ib0");
	check(setsockopt(fd, IPPROTO_IP, IP_ADD_MEMBERSHIP, &member, sizeof(member)), "join");
	return fd;
}

/*
 * `count` datagrams from `senders` sockets in turn, `burst` each time; each
 * reaches `copies` of the `receivers`.
 */
struct plan {
	int senders[MAX_NODES], receivers[MAX_NODES];
	int nr_senders, nr_receivers, burst, copies, size;
};

static unsigned long long datagrams(const struct plan *plan, long count, int patience)
{
	struct mmsghdr messages[BATCH];
	struct iovec piece = { buffer, plan->size };
	unsigned long long received = 0;

	for (int i = 0; i < BATCH; i++)
		messages[i] = message(&piece);
	for (long sent = 0; sent < count; sent += plan->burst * plan->nr_senders) {
		int each = plan->burst * plan->nr_senders * plan->copies / plan->nr_receivers;

		for (int i = 0; i < plan->nr_senders; i++)
			check(sendmmsg(plan->senders[i], messages, plan->burst, 0), "sendmmsg");
		for (int i = 0; i < plan->nr_receivers; i++)
			received += drain(plan->receivers[i], each, patience);
	}
	return received;
}

static void run_datagrams(const struct plan *plan, long count)
{
	int turn = plan->burst * plan->nr_senders;
	unsigned long long sent, received;

	/* Until every way is known. */
	for (int i = 0; i < 100; i++) {
		received = datagrams(plan, turn, 200);
		if (received == (unsigned long long)turn * plan->copies)
			break;
	}
	datagrams(plan, count / WARM_UP, 200);
	sent = (count + turn - 1) / turn * turn;
	begin();
	received = datagrams(plan, count, 200);
	end(sent, received, received * plan->size);
}

static int connected_to(int from, int node, int port)
{
	struct sockaddr_in to = address_of(node);
	int fd = open_socket(from, SOCK_DGRAM);

	to.sin_port = htons(port);
	check(connect(fd, (struct sockaddr *)&to, sizeof(to)), "connect");
	return fd;
}

static void udp(int size, long count, int flows)
{
	struct plan plan = {
		.nr_senders = flows, .nr_receivers = flows, .copies = 1, .size = size,
		.burst = BATCH / flows,
	};

	for (int i = 0; i < flows; i++) {
		plan.senders[i] = connected_to(0, 1, PORT + i);
		plan.receivers[i] = bound(1, SOCK_DGRAM, PORT + i);
	}
	run_datagrams(&plan, count);
}

static void peers(int size, long count, int number)
{
	struct plan plan = {
		.nr_senders = number, .nr_receivers = number, .copies = 1, .size = size, .burst = 1,
	};

	nodes = number + 1;
	for (int i = 0; i < number; i++) {
		plan.senders[i] = connected_to(0, i + 1, PORT);
		plan.receivers[i] = bound(i + 1, SOCK_DGRAM, PORT);
	}
	run_datagrams(&plan, count);
}

static void multicast(int size, long count, int members)
{
	struct plan plan = {
		.nr_senders = 1, .nr_receivers = members, .copies = members, .size = size,
		.burst = BATCH,
	};
	struct sockaddr_in to = address_of(0);
	struct in_addr own = to.sin_addr;
	int off = 0;

	nodes = members + 1;
	for (int i = 0; i < members; i++)
		plan.receivers[i] = group_socket(i + 1);
	plan.senders[0] = open_socket(0, SOCK_DGRAM);
	to.sin_addr.s_addr = inet_addr("239.9.9.9");
	setsockopt(plan.senders[0], IPPROTO_IP, IP_MULTICAST_LOOP, &off, sizeof(off));
	check(setsockopt(plan.senders[0], IPPROTO_IP, IP_MULTICAST_IF, &own, sizeof(own)), "send");
	check(connect(plan.senders[0], (struct sockaddr *)&to, sizeof(to)), "connect");
	run_datagrams(&plan, count);
}

static void cold(int number)
{
	int receivers[MAX_NODES], sender = open_socket(0, SOCK_DGRAM);
	unsigned long long received = 0;

	nodes = number + 1;
	for (int i = 0; i < number; i++)
		receivers[i] = bound(i + 1, SOCK_DGRAM, PORT);
	begin();
	for (int i = 0; i < number; i++) {
		struct sockaddr_in to = address_of(i + 1);

		check(sendto(sender, buffer, 64, 0, (struct sockaddr *)&to, sizeof(to)), "sendto");
	}
	for (int i = 0; i < number; i++)
		received += drain(receivers[i], 1, PATIENCE);
	end(number, received, received * 64);
}

static void tcp_pair(int *a, int *b)
{
	struct sockaddr_in to = address_of(1);
	int one = 1, listener = bound(1, SOCK_STREAM, PORT);

	check(listen(listener, 1), "listen");
	*a = open_socket(0, SOCK_STREAM);
	check(connect(*a, (struct sockaddr *)&to, sizeof(to)), "connect");
	*b = check(accept(listener, NULL, NULL), "accept");
	close(listener);
	setsockopt(*a, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	setsockopt(*b, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	fcntl(*a, F_SETFL, O_NONBLOCK);
	fcntl(*b, F_SETFL, O_NONBLOCK);
}

static void stream(int a, int b, long long bytes)
{
	static unsigned char sink[1 << 18];
	long long sent = 0, received = 0;

	while (received < bytes) {
		ssize_t want = sizeof(buffer), out = 0, in;

		if (bytes - sent < want)
			want = bytes - sent;
		if (want)
			out = send(a, buffer, want, 0);
		in = recv(b, sink, sizeof(sink), 0);
		if ((out < 0 || in < 0) && errno != EAGAIN)
			fail("TCP");
		sent += out > 0 ? out : 0;
		received += in > 0 ? in : 0;
		if (out <= 0 && in <= 0 && !readable(b, PATIENCE)) {
			errno = ETIMEDOUT;
			fail("TCP");
		}
	}
}

static void tcp(long long bytes)
{
	int a, b;

	tcp_pair(&a, &b);
	stream(a, b, bytes / 4 + 1);
	begin();
	stream(a, b, bytes);
	end(0, 0, bytes);
}

static void pass(int from, int to)
{
	unsigned char byte = 'x';

	check(send(from, &byte, 1, 0), "send");
	while (recv(to, &byte, 1, 0) != 1) {
		if (errno != EAGAIN || !readable(to, PATIENCE))
			fail("TCP");
	}
}

static void trips(long count)
{
	int a, b;

	tcp_pair(&a, &b);
	for (long i = -count / 8; i < count; i++) {
		if (!i)
			begin();
		pass(a, b);
		pass(b, a);
	}
	end(2 * count, 2 * count, 2 * count);
}

static void set_up(int fd, int up)
{
	struct ifreq request = { .ifr_name = "ib0" };

	check(ioctl(fd, SIOCGIFFLAGS, &request), "flags");
	request.ifr_flags = up ? request.ifr_flags | IFF_UP : request.ifr_flags & ~IFF_UP;
	check(ioctl(fd, SIOCSIFFLAGS, &request), "flags");
	while (up) {
		check(ioctl(fd, SIOCGIFFLAGS, &request), "flags");
		if (request.ifr_flags & IFF_RUNNING)
			return;
		usleep(100);
	}
}

static void link_rounds(int rounds)
{
	int fd = open_socket(1, SOCK_DGRAM);
	unsigned long long down = 0, up = 0;

	for (int i = 0; i < rounds; i++) {
		unsigned long long start = now(), middle;

		set_up(fd, 0);
		middle = now();
		set_up(fd, 1);
		down += middle - start;
		up += now() - middle;
	}
	printf("{\"down_ns\": %llu, \"up_ns\": %llu}\n", down / rounds, up / rounds);
}

int main(int argc, char **argv)
{
	const char *what;
	long numbers[3] = { 0 };

	while (argc > 2 && (!strcmp(argv[1], "-m") || !strcmp(argv[1], "-n"))) {
		*(argv[1][1] == 'm' ? &mark : &first) = atoi(argv[2]);
		argc -= 2;
		argv += 2;
	}
	what = argc > 1 ? argv[1] : "";
	for (int i = 2; i < argc && i < 5; i++)
		numbers[i - 2] = atol(argv[i]);
	if (!strcmp(what, "udp") && numbers[2] >= 1 && numbers[2] <= BATCH) {
		udp(numbers[0], numbers[1], numbers[2]);
	} else if (!strcmp(what, "tcp") && numbers[0]) {
		tcp(numbers[0]);
	} else if (!strcmp(what, "trips") && numbers[0]) {
		trips(numbers[0]);
	} else if (!strcmp(what, "peers") && numbers[2] >= 1 && numbers[2] < MAX_NODES) {
		peers(numbers[0], numbers[1], numbers[2]);
	} else if (!strcmp(what, "multicast") && numbers[2] >= 1 && numbers[2] < MAX_NODES) {
		multicast(numbers[0], numbers[1], numbers[2]);
	} else if (!strcmp(what, "cold") && numbers[0] >= 1 && numbers[0] < MAX_NODES) {
		cold(numbers[0]);
	} else if (!strcmp(what, "link") && numbers[0]) {
		link_rounds(numbers[0]);
	} else {
		fprintf(stderr, "load: its source says at the top how it is called\n");
		return 2;
	}
	return 0;
}

module shoal.dev/hack/cluster/pause

go 1.25.0
